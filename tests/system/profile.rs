//! `kvasir profile` on mock engines whose step times are known.

mod support;

use std::process::Command;

use support::{Scratch, wait_for};

/// Microseconds: a step, a request, a token of KV, a prompt token, the square of a prompt's tokens.
const TRUTH: [f64; 5] = [8_000.0, 60.0, 0.1, 20.0, 0.004];
const KEYS: [&str; 5] = [
    "step_base_us",
    "step_per_request_us",
    "step_per_kv_token_us",
    "step_per_prompt_token_us",
    "step_per_prompt_square_us",
];

#[test]
fn the_step_times_of_a_known_engine_are_found() {
    let scratch = Scratch::new("profile");
    let [base, request, kv_token, prompt_token, square] = TRUTH;
    let engine = support::Process::start(&[
        "mock",
        "--step-ms",
        &(base / 1e3).to_string(),
        "--request-us",
        &request.to_string(),
        "--kv-token-us",
        &kv_token.to_string(),
        "--prefill-rate",
        &(1e6 / prompt_token).to_string(),
        "--prompt-square-us",
        &square.to_string(),
    ]);
    wait_for("the engine", || {
        support::get(&engine.address, "/health").is_ok_and(|(status, _)| status == 200)
    });
    let file = scratch.config("planner.toml", "");
    let output = Command::new(env!("CARGO_BIN_EXE_kvasir"))
        .args(["profile", &engine.url(), "--output", &file])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let text = std::fs::read_to_string(&file).expect("the file");
    assert_eq!(text, String::from_utf8_lossy(&output.stdout));
    let planner = control_config::parse(&text).expect("they are settings").planner;
    let found = [
        planner.step_base_us,
        planner.step_per_request_us,
        planner.step_per_kv_token_us,
        planner.step_per_prompt_token_us,
        planner.step_per_prompt_square_us,
    ];
    assert_eq!(planner.kv_tokens, 16_384 * 16);
    // What a planner needs of them: the times of loads between those that were measured. A coefficient by itself may be off where
    // it has little part in any time.
    let decode = |of: [f64; 5], requests: f64, held: f64| of[0] + of[1] * requests + of[2] * held;
    let prompt = |of: [f64; 5], tokens: f64| of[3] * tokens + of[4] * tokens * tokens;
    let mut worst: f64 = 0.0;
    for (requests, held) in [(2.0, 3_000.0), (16.0, 20_000.0), (24.0, 60_000.0), (32.0, 120_000.0)] {
        worst = worst.max((decode(found, requests, held) / decode(TRUTH, requests, held) - 1.0).abs());
    }
    for tokens in [700.0, 3_000.0, 6_000.0] {
        worst = worst.max((prompt(found, tokens) / prompt(TRUTH, tokens) - 1.0).abs());
    }
    for ((key, found), truth) in KEYS.iter().zip(found).zip(TRUTH) {
        println!("{key}: {found:.4}, known {truth} ({:+.1} %)", (found / truth - 1.0) * 100.0);
    }
    println!("times between and within the measured loads are off by {:.1} % at most", worst * 100.0);
    // A shared machine is late now and then: 2 to 4 % on a quiet one.
    assert!(worst < 0.25, "{text}");
}

#[test]
fn an_engine_that_cannot_be_measured_is_told_why() {
    let profile = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvasir"))
            .arg("profile")
            .args(arguments)
            .output()
            .expect("it runs");
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let nobody = support::free_address();
    assert!(profile(&[&format!("http://{nobody}")]).contains(&nobody));
    let engine = support::Process::start(&["mock"]);
    wait_for("the engine", || {
        support::get(&engine.address, "/health").is_ok_and(|(status, _)| status == 200)
    });
    let said = profile(&[&engine.url(), "--model", "other"]);
    assert!(said.contains("404") && said.contains("other"), "{said}");
}
