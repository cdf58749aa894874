//! `kvasir profile` and `kvasir plan size` on mock engines whose step times are known.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::support;
use crate::support::{Events, Process, Scratch, wait_for};
use serde_json::json;

/// In microseconds: a step, a request, a token of KV, a prompt token, the square of a prompt's tokens.
const STEP_TIMES: [f64; 5] = [8_000.0, 60.0, 0.1, 20.0, 0.004];
const KEYS: [&str; 5] = [
    "step_base_us",
    "step_per_request_us",
    "step_per_kv_token_us",
    "step_per_prompt_token_us",
    "step_per_prompt_square_us",
];

/// Starts an engine with the step times of [`STEP_TIMES`].
fn known_engine() -> Process {
    let [base, request, kv_token, prompt_token, square] = STEP_TIMES;
    let engine = Process::start(&[
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
    engine
}

#[test]
fn the_step_times_of_a_known_engine_are_found() {
    let scratch = Scratch::new("profile");
    let engine = known_engine();
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
    // The planner needs the step times of loads between the measured ones. A single coefficient may be
    // inaccurate if it contributes little to all times.
    let decode = |of: [f64; 5], requests: f64, held: f64| of[0] + of[1] * requests + of[2] * held;
    let prompt = |of: [f64; 5], tokens: f64| of[3] * tokens + of[4] * tokens * tokens;
    let mut worst: f64 = 0.0;
    for (requests, held) in [(2.0, 3_000.0), (16.0, 20_000.0), (24.0, 60_000.0), (32.0, 120_000.0)] {
        worst = worst.max((decode(found, requests, held) / decode(STEP_TIMES, requests, held) - 1.0).abs());
    }
    for tokens in [700.0, 3_000.0, 6_000.0] {
        worst = worst.max((prompt(found, tokens) / prompt(STEP_TIMES, tokens) - 1.0).abs());
    }
    for ((key, found), truth) in KEYS.iter().zip(found).zip(STEP_TIMES) {
        println!("{key}: {found:.4}, known {truth} ({:+.1} %)", (found / truth - 1.0) * 100.0);
    }
    println!("times between and within the measured loads are off by {:.1} % at most", worst * 100.0);
    // A shared machine is sometimes late; on an idle one the error is 2 to 4 %.
    assert!(worst < 0.25, "{text}");
}

const PROMPT_TOKENS: usize = 4_000;
const ANSWER_TOKENS: usize = 40;
const TTFT: Duration = Duration::from_secs(1);
const ITL: Duration = Duration::from_millis(100);

/// Whether a stream that was due at `due` met the service level.
fn is_in_time(gateway: &str, seed: u64, due: Instant) -> bool {
    let body = json!({"model": "tiny", "prompt": support::prompt(seed, PROMPT_TOKENS), "stream": true,
        "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": true});
    let mut events = Events::new(support::open(gateway, "/v1/completions", &body).expect("a connection"));
    let head = events.head();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}{}", events.rest());
    let mut pieces = Vec::new();
    while let Some(data) = events.next_data() {
        if data != "[DONE]" {
            pieces.push(Instant::now());
        }
    }
    let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return false };
    *first - due <= TTFT && (*last - *first) / ANSWER_TOKENS as u32 <= ITL
}

/// Returns the share of requests that meet the service level, at an open-loop rate.
fn attained(engines: &[Process], rate: f64, seconds: f64) -> f64 {
    let mut arguments = vec!["gateway".to_owned()];
    arguments.extend(engines.iter().flat_map(|engine| ["--worker".to_owned(), engine.url()]));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let gateway = Process::start(&arguments);
    wait_for("all engines", || {
        let (_, body) = support::get(&gateway.address, "/kvasir/status").unwrap_or_default();
        body.matches("\"ready\":true").count() == engines.len()
    });
    let mut random = fastrand::Rng::with_seed(0x9E37_79B9_7F4A_7C15);
    let mut uniform = || (random.u64(..1 << 32) as f64 + 1.0) / 2_f64.powi(32);
    let (began, mut at) = (Instant::now(), 0.0);
    std::thread::scope(|scope| {
        let mut asked = Vec::new();
        while at < seconds {
            at -= uniform().ln() / rate;
            let (due, seed) = (began + Duration::from_secs_f64(at), asked.len() as u64);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let address = gateway.address.as_str();
            asked.push(scope.spawn(move || is_in_time(address, seed, due)));
        }
        let all = asked.len();
        let in_time = asked.into_iter().filter_map(|asked| asked.join().ok()).filter(|is| *is).count();
        in_time as f64 / all as f64
    })
}

/// As many engines as `kvasir plan size` computes keep the service level under an open-loop load, and half as
/// many do not.
#[test]
fn a_fleet_of_the_planned_size_keeps_the_service_level() {
    const RATE: f64 = 10.0;
    let scratch = Scratch::new("plan-size");
    let known: String =
        KEYS.iter().zip(STEP_TIMES).map(|(key, value)| format!("{key} = {value:?}\n")).collect();
    let config = scratch.config("planner.toml", &format!("[planner]\n{known}kv_tokens = {}\n", 16_384 * 16));
    let output = Command::new(env!("CARGO_BIN_EXE_kvasir"))
        .args(["plan", "size", "--config", &config])
        .args(["--prompt", &PROMPT_TOKENS.to_string(), "--output", &ANSWER_TOKENS.to_string()])
        .args(["--rate", &RATE.to_string()])
        .args(["--ttft", &TTFT.as_secs_f64().to_string(), "--itl", &ITL.as_secs_f64().to_string()])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    let (before, _) = said.split_once(" workers that do both").expect(&said);
    let size: usize = before.rsplit(' ').next().and_then(|count| count.parse().ok()).expect(&said);
    println!("{}", said.lines().take(2).collect::<Vec<_>>().join("\n"));
    assert!(size >= 2, "{said}");
    let engines: Vec<Process> = (0..size).map(|_| known_engine()).collect();
    let (planned, half) = (attained(&engines, RATE, 15.0), attained(&engines[..size / 2], RATE, 15.0));
    println!(
        "{RATE} requests/s in time: {:.1} % with {size} engines, {:.1} % with {}",
        planned * 100.0,
        half * 100.0,
        size / 2
    );
    // The plan is for 99 %; a shared machine is sometimes late.
    assert!(planned >= 0.9 && half < 0.7, "{said}");
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
