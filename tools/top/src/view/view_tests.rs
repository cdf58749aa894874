//! Frames as text, with what a gateway may say at its best and at its worst.

use super::*;
use crate::keys::{Action, Step};
use crate::terminal::frame;
use crate::testing::{answer, status};
use crate::wire::Worker;

fn seconds(value: u64) -> Duration {
    Duration::from_secs(value)
}

/// A minute of a gateway with four workers.
fn known() -> State {
    let mut state = State::new("127.0.0.1:8080".to_owned());
    for second in 0..=60 {
        state.answer(answer(1 + second, second..second + 1), seconds(second));
    }
    state
}

fn shown(state: &State, display: &mut Display, width: u16, height: u16) -> String {
    let text = frame(state, display, seconds(60), width, height);
    assert_eq!(text.lines().count(), usize::from(height));
    assert!(text.lines().all(|line| Span::raw(line).width() <= usize::from(width)), "{text}");
    text
}

fn on(view: View) -> Display {
    Display { view, ..Display::default() }
}

#[test]
fn the_overview_at_80_by_24() {
    let text = shown(&known(), &mut Display::default(), 80, 24);
    for part in [
        "kvasir 0.1.0  model qwen3  strategy predicted-time  up 1h",
        "● 127.0.0.1:8080",
        " 1 Overview ",
        // 10 requests, 1000 prompt tokens with 640 cached and 200 generated a second.
        "10  1m 10",
        "200  in 1.0k",
        "64%  all 64%",
        "latency, last 1m00s (w)",
        "TTFT p50 ",
        "ITL  p50 ",
        "workers, 3 of 4 ready, by name (s)",
        "127.0.0.1:8001",
        "exact",
        "down",
        "q quit",
    ] {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
    assert!(!text.contains("decisions,"), "there is no room for them:\n{text}");
}

#[test]
fn the_overview_at_200_by_60() {
    let text = shown(&known(), &mut Display::default(), 200, 60);
    for part in [
        "time to first token, last 1m00s",
        "inter-token latency",
        "routing decision",
        "pools by tier",
        "3 workers, 1 of unknown size",
        "decisions, newest first",
        "20 of 32 blocks are here",
        "vllm 0.32.0",
        "≤20ms",
    ] {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
}

#[test]
fn every_view_shows_its_own() {
    let state = known();
    for (view, parts) in [
        (View::Workers, &["workers, 3 of 4 ready", "127.0.0.1:8004"][..]),
        (View::Latency, &["time to first token, last 1m00s (w)", "█", "n 600"]),
        (View::Pools, &["pools by tier", "device", "840 indexed of 3.1k", "280/1.0k", "40/?"]),
        (
            View::Transfers,
            &["stages of hand-offs", "verify", "30", "rdma mlx5_1 slow", "977", "60.0 MiB", "1.0 MiB"],
        ),
        (View::Decisions, &["decisions, newest first", "20/32", "12.1ms", "20 of 32 blocks"]),
    ] {
        let text = shown(&state, &mut on(view), 80, 24);
        for part in parts {
            assert!(text.contains(part), "{view:?}: {part:?} is missing in:\n{text}");
        }
    }
}

/// Cells that are empty take their column: what is behind them stands below its heading.
#[test]
fn numbers_of_hand_offs_stand_below_their_headings() {
    let text = shown(&known(), &mut on(View::Transfers), 140, 24);
    let lines: Vec<&str> = text.lines().collect();
    let heading = lines.iter().position(|line| line.contains("worker, transport")).expect("a heading");
    let below = |title: &str, row: usize| {
        let ends = lines[heading].chars().collect::<String>();
        let at = ends.find(title).map(|at| ends[..at + title.len()].chars().count()).expect("a column");
        let cells: String = lines[heading + row].chars().take(at).collect();
        cells.rsplit(' ').next().map(str::to_owned).unwrap_or_default()
    };
    assert_eq!([below("blocks in", 1), below("whole", 1), below("part", 1)], ["77", "5", "1"], "{text}");
    assert_eq!([below("ns/KiB", 3), below("lost", 3), below("retry", 3)], ["977", "1", "12"], "{text}");
    assert_eq!(below("whole", 3), "", "a transport has none: {text}");
}

#[test]
fn latencies_since_start_are_more_than_those_of_the_last_minute() {
    let state = known();
    let mut display = on(View::Latency);
    display.apply(Action::Window);
    let text = shown(&state, &mut display, 80, 24);
    assert!(text.contains("time to first token, since start (w)") && text.contains("n 610"), "{text}");
}

#[test]
fn hundreds_of_workers_are_scrolled_and_sorted() {
    let mut state = known();
    let worker = |number: u64| Worker {
        name: format!("worker-{number:03}"),
        ready: true,
        requests: Some(number),
        ..Worker::default()
    };
    state.status.as_mut().expect("a status").workers = (0..500).map(worker).collect();
    let mut display = on(View::Workers);
    let text = shown(&state, &mut display, 80, 24);
    assert!(text.contains("worker-000") && text.contains("1-18 of 500"), "{text}");
    display.apply(Action::Scroll(Step::PageDown));
    let text = shown(&state, &mut display, 80, 24);
    assert!(text.contains("worker-018") && !text.contains("worker-017"), "{text}");
    display.apply(Action::Scroll(Step::Last));
    let text = shown(&state, &mut display, 80, 24);
    assert!(text.contains("worker-499") && text.contains("483-500 of 500"), "{text}");
    display.apply(Action::Scroll(Step::First));
    display.apply(Action::Sort);
    let text = shown(&state, &mut display, 80, 24);
    assert!(text.contains("by requests (s)") && text.contains("worker-499"), "{text}");
    // The terminal grows while the end is shown.
    display.apply(Action::Scroll(Step::Last));
    let text = shown(&state, &mut display, 80, 24);
    assert!(text.contains("worker-000"), "{text}");
    let text = shown(&state, &mut display, 120, 60);
    assert!(text.contains("worker-000") && text.contains("447-500 of 500"), "{text}");
}

#[test]
fn a_gateway_that_says_little_or_nothing() {
    for status in ["{}", r#"{"workers":[{"name":"w","ready":false},{}]}"#, r#"{"workers":[{"ready":true}]}"#]
    {
        let mut state = State::new("h:1".to_owned());
        for second in 0..3 {
            let mut answer = answer(1, 0..0);
            answer.status = serde_json::from_str(status).expect("parses");
            state.answer(answer, seconds(second));
        }
        for view in View::ALL {
            for (width, height) in [(80, 24), (200, 60)] {
                let text = shown(&state, &mut on(view), width, height);
                assert!(text.contains("model -"), "{text}");
                assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
            }
        }
    }
}

#[test]
fn hostile_names_reach_the_screen_as_text() {
    let hostile = "\u{1b}[2J\u{1b}]0;owned\u{7}\u{9b}31m\u{202e}evil\r\n\u{8}";
    let body = serde_json::json!({
        "version": hostile, "model": hostile, "strategy": hostile, "started_unix": 1,
        "workers": [{
            "name": hostile, "ready": true, "engine": hostile, "version": hostile, "role": hostile,
            "kv_usage": 1e308, "slowness": -1e308, "requests": u64::MAX,
            "pools": [{ "tier": hostile, "blocks": u64::MAX, "indexed": u64::MAX },
                      { "tier": hostile, "blocks": u64::MAX, "indexed": u64::MAX }],
        }],
    });
    let decisions = serde_json::json!({ "last": 1, "decisions": [
        { "sequence": 1, "worker": hostile, "prefill": hostile, "reason": hostile, "predicted_ms": 1e308 },
    ] });
    let mut state = State::new("h:1".to_owned());
    for second in 0..2 {
        let mut answer = answer(1, 0..0);
        answer.status = serde_json::from_value(body.clone()).expect("parses");
        answer.decisions = Ok(serde_json::from_value(decisions.clone()).expect("parses"));
        state.answer(answer, seconds(second));
    }
    for view in View::ALL {
        for (width, height) in [(80, 24), (200, 60)] {
            let text = shown(&state, &mut on(view), width, height);
            let harmful = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
            assert!(!text.contains(harmful), "{view:?}: {text:?}");
            assert!(text.contains("\u{fffd}[2J"), "it is shown, without effect: {text}");
        }
    }
}

#[test]
fn no_answer_is_shown_with_its_reason_and_the_age_of_what_is_known() {
    let refused = "401: the gateway wants an administrator's key; give one with --key-file or KVASIR_KEY";
    let mut state = State::new("127.0.0.1:8080".to_owned());
    let text = shown(&state, &mut Display::default(), 80, 24);
    assert!(text.contains("… asking 127.0.0.1:8080"), "{text}");
    state.failed(refused.to_owned(), seconds(1));
    let text = shown(&state, &mut Display::default(), 80, 24);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["✗ error at 127.0.0.1:8080", "401", "--key-file or KVASIR_KEY", "tried again"] {
        assert!(words.contains(part), "{part:?} is missing in:\n{text}");
    }
    let mut state = known();
    state.failed("127.0.0.1:8080: Connection refused (os error 111)".to_owned(), seconds(61));
    let text = frame(&state, &mut Display::default(), seconds(102), 80, 24);
    for part in ["✗ error, data 42s old", "Connection refused", "workers, 3 of 4"] {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
    let mut display = Display { is_paused: true, ..Display::default() };
    assert!(shown(&known(), &mut display, 80, 24).contains("‖ paused, 0s old"));
}

#[test]
fn decisions_that_cannot_be_had_do_not_hide_the_rest() {
    let mut state = known();
    state.decisions_error = Some("GET /kvasir/decisions answered 404 Not Found".to_owned());
    let text = shown(&state, &mut Display::default(), 100, 30);
    assert!(text.contains("answered 404") && text.contains("127.0.0.1:8001"), "{text}");
}

#[test]
fn the_keys_are_shown_when_asked_for() {
    let mut display = Display { has_help: true, ..Display::default() };
    let text = shown(&known(), &mut display, 80, 24);
    for (keys, _) in crate::keys::HELP {
        assert!(text.contains(keys.split(' ').next().expect("a key")), "{keys} is missing in:\n{text}");
    }
    assert!(text.contains("pause"), "{text}");
}

#[test]
fn no_size_is_too_small() {
    let (full, empty) = (known(), State::new("h:1".to_owned()));
    for (width, height) in [(1, 1), (1, 60), (3, 2), (10, 5), (20, 10), (79, 8), (200, 1), (500, 200)] {
        for view in View::ALL {
            let mut display = Display { has_help: true, is_since_start: true, ..on(view) };
            display.apply(Action::Scroll(Step::Last));
            for state in [&full, &empty] {
                shown(state, &mut display, width, height);
            }
        }
    }
    assert_eq!(status(1).workers.len(), 4);
}
