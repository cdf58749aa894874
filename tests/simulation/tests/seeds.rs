//! A few simulated clusters; CI and manual runs use more (`README.md`).

use std::process::Command;

/// Runs the simulator; returns its output, and whether it succeeded.
fn simulate(arguments: &[&str]) -> (String, bool) {
    let run = Command::new(env!("CARGO_BIN_EXE_kvasir-simulation")).args(arguments).output();
    let run = run.expect("the simulator");
    let text = String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
    (text, run.status.success())
}

#[test]
fn clusters_live_through_faults() {
    let (told, is_good) = simulate(&["--first", "1", "--seeds", "120"]);
    assert!(is_good, "{told}");
    assert!(told.contains("120 seeds passed, 0 failed"), "{told}");
}

#[test]
fn an_equal_seed_is_an_equal_life() {
    let (told, is_good) = simulate(&["--first", "1", "--seeds", "16", "--twice"]);
    assert!(is_good, "{told}");
    assert!(told.contains("32 seeds passed, 0 failed"), "{told}");
    // Two processes have other addresses, and tables of theirs that hash addresses another order.
    let hash = || {
        let (told, is_good) = simulate(&["--first", "1", "--seeds", "16", "--hash"]);
        assert!(is_good, "{told}");
        told.lines().find(|line| line.starts_with("hash of all traces ")).expect("a hash").to_owned()
    };
    assert_eq!(hash(), hash());
}

#[test]
fn nothing_to_run_is_a_failure() {
    let (told, is_good) = simulate(&["--seeds", "0"]);
    assert!(!is_good && told.contains("no plan was run"), "{told}");
}

#[test]
fn what_ever_failed_passes() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/plans");
    let files = std::fs::read_dir(folder).expect("the saved plans");
    let names = files.map(|file| file.expect("a file").file_name().into_string().expect("a name"));
    let plans = names.filter(|name| name.ends_with(".json")).count();
    let (told, is_good) = simulate(&["--plans", folder]);
    assert!(is_good && plans > 0, "{told}");
    assert!(told.contains(&format!("{plans} seeds passed, 0 failed")), "{told}");
}

/// Tests the oracles and the shrinking: a plan that expects an answer that no engine gives.
#[test]
fn a_wrong_answer_is_found_shrunk_and_told() {
    let folder = std::env::temp_dir().join(format!("kvasir-simulation-test-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = folder.join("plan.json");
    let saved = file.display().to_string();
    let (told, is_good) =
        simulate(&["--first", "1", "--seeds", "40", "--plant-wrong-answer", "--save", &saved]);
    assert!(!is_good, "{told}");
    assert!(told.contains("shrunk to 1 of them, and it fails still: [tokens] request"), "{told}");
    let (again, is_good) = simulate(&["--plan", &saved, "--plant-wrong-answer"]);
    assert!(!is_good && again.contains("not the reference's"), "{again}");
    let (healthy, is_good) = simulate(&["--plan", &saved]);
    assert!(is_good, "{healthy}");
    std::fs::remove_dir_all(folder).expect("the folder");
}
