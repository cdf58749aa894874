//! The judge of `tier soak` passes a run of seconds, and finds each planted fault. A process each, as it judges all of
//! its own memory, threads and descriptors.

use std::process::{Command, Output};

fn soak(arguments: &[&str]) -> (Output, String) {
    let binary = env!("CARGO_BIN_EXE_kvasir-bench");
    let output =
        Command::new(binary).args(["--smoke", "tier", "soak"]).args(arguments).output().expect("it starts");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output, text)
}

/// The verdicts that failed.
fn failed(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix("FAILED ")?.split(':').next()).collect()
}

#[test]
fn a_short_run_passes() {
    let (output, text) = soak(&["--seed", "3"]);
    assert!(output.status.success(), "{text}");
    for name in ["memory", "shared memory", "leases", "files", "descriptors", "threads", "bytes", "turnover"]
    {
        assert!(text.lines().any(|line| line.starts_with(&format!("ok     {name}: "))), "{name}: {text}");
    }
}

#[test]
fn planted_faults_are_found_and_named() {
    let cases: [(&str, &[&str]); 3] = [
        ("leak", &["memory", "leases"]),
        ("grow", &["files", "descriptors", "threads"]),
        ("wrong", &["bytes"]),
    ];
    for (plant, names) in cases {
        let (output, text) = soak(&["--plant", plant]);
        assert_eq!(output.status.code(), Some(1), "{plant}: {text}");
        for name in names {
            assert!(failed(&text).contains(name), "{plant} is not found in the {name}: {text}");
        }
    }
}

#[test]
fn too_little_room_is_refused_before_anything_is_written() {
    let folder = std::env::temp_dir().join(format!("kvasir-soak-room-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("a folder");
    let output = Command::new(env!("CARGO_BIN_EXE_kvasir-bench"))
        .args(["tier", "soak", "--disk", "1048576GiB", "--folder"])
        .arg(&folder)
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let left = std::fs::read_dir(&folder).expect("a folder").count();
    std::fs::remove_dir(&folder).expect("empty");
    if text.contains("is memory, not a disk") {
        eprintln!("SKIPPED: the folder for temporary files is memory");
        return;
    }
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("the disk tier needs") && left == 0, "{text}");
}
