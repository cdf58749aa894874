//! The judge of `tier soak` passes a run of seconds, and finds each planted fault. Each run is a process of its
//! own, since it judges all of its memory, threads and descriptors.

use std::process::{Command, Output};

/// Many small blocks in a few seconds, to show what each block leaves behind.
const MANY_BLOCKS: [&str; 10] =
    ["--minutes", "0.1", "--data", "32MiB", "--host", "1MiB", "--disk", "8MiB", "--block", "4KiB"];

fn smoke(arguments: &[&str]) -> (Output, String) {
    soak(&[&["--smoke", "tier", "soak"][..], arguments].concat())
}

fn soak(arguments: &[&str]) -> (Output, String) {
    let binary = env!("CARGO_BIN_EXE_kvasir-bench");
    let output = Command::new(binary).args(arguments).output().expect("it starts");
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
    let (output, text) = smoke(&["--seed", "3"]);
    assert!(output.status.success(), "{text}");
    let names = ["memory", "memory per block", "shared memory", "leases", "files", "descriptors", "threads"];
    for name in names.into_iter().chain(["bytes", "turnover"]) {
        assert!(text.lines().any(|line| line.starts_with(&format!("ok     {name}: "))), "{name}: {text}");
    }
}

#[test]
fn a_run_without_the_time_for_its_data_goes_on_until_it_has_passed() {
    // As on a disk that is hundreds of times slower than the pace requires.
    let (_, text) = smoke(&["--minutes", "0.0005"]);
    assert!(text.contains("ok     turnover: "), "{text}");
}

/// Returns the verdict on memory per block; `None` if the machine was too slow for one.
fn per_block(text: &str) -> Option<bool> {
    let line = text.lines().find(|line| line.contains(" memory per block: ")).expect("a verdict");
    if line.contains("skipped: ") {
        eprintln!("SKIPPED: {line}");
        return None;
    }
    Some(line.starts_with("ok "))
}

#[test]
fn a_little_memory_for_each_block_is_found_by_that_alone() {
    let whole = |more: &[&'static str]| soak(&[&["tier", "soak"][..], &MANY_BLOCKS[..], more].concat()).1;
    let text = whole(&[]);
    assert_ne!(per_block(&text), Some(false), "without a fault: {text}");
    let text = whole(&["--plant", "drip"]);
    assert_ne!(per_block(&text), Some(true), "{text}");
    assert!(!failed(&text).contains(&"memory"), "it is too little for the other bound: {text}");
}

#[test]
fn planted_faults_are_found_and_named() {
    let cases: [(&str, &[&str]); 3] = [
        ("leak", &["memory", "leases"]),
        ("grow", &["files", "descriptors", "threads"]),
        ("wrong", &["bytes"]),
    ];
    for (plant, names) in cases {
        let (output, text) = smoke(&["--plant", plant]);
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
