//! A gateway's status and decisions as JSON. A field that is missing or null takes its default, so that older and newer
//! gateways can be watched, and unknown fields are skipped.
//!
//! Text is cleaned here: after this module a text contains no control character, nothing that reorders or hides text, and
//! at most [`TEXT_CHARS_MAX`] characters. Histograms are checked here: afterwards each has one count more than bounds, and
//! its bounds rise.

use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// Longest text in characters; the rest is cut.
pub(crate) const TEXT_CHARS_MAX: usize = 256;
/// Replacement of a removed character.
const REPLACEMENT: char = '\u{fffd}';

/// Answer of `GET /kvasir/status`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Status {
    #[serde(deserialize_with = "text")]
    pub(crate) version: String,
    #[serde(deserialize_with = "text")]
    pub(crate) model: String,
    #[serde(deserialize_with = "text")]
    pub(crate) strategy: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) started_unix: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) now_unix_ms: u64,
    pub(crate) active: Option<u64>,
    pub(crate) waiting: Option<u64>,
    #[serde(flatten)]
    pub(crate) counters: Counters,
    #[serde(deserialize_with = "or_default")]
    pub(crate) index: Index,
    #[serde(deserialize_with = "or_default")]
    pub(crate) histograms: Histograms,
    #[serde(deserialize_with = "or_default")]
    pub(crate) workers: Vec<Worker>,
}

impl Status {
    /// Time since the gateway's start; zero when it is not reported.
    pub(crate) fn uptime(&self) -> Duration {
        let started_ms = self.started_unix.saturating_mul(1000);
        let is_known = self.started_unix > 0;
        Duration::from_millis(if is_known { self.now_unix_ms.saturating_sub(started_ms) } else { 0 })
    }
}

/// The gateway's samples of itself, oldest first: each has the fields of a status that change with load.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Samples {
    #[serde(deserialize_with = "or_default")]
    pub(crate) samples: Vec<Status>,
}

/// Counters, which only rise while a gateway runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Counters {
    #[serde(deserialize_with = "or_default")]
    pub(crate) requests: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) failed: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) shed: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) migrations: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) disaggregated: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) hedged: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) broken_streams: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) prompt_tokens: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) cached_tokens: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) generated_tokens: u64,
}

/// Size of the gateway's prefix index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Index {
    pub(crate) blocks: Option<u64>,
    pub(crate) bytes: Option<u64>,
    pub(crate) nodes: Option<u64>,
}

/// The gateway's latencies.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Histograms {
    #[serde(deserialize_with = "or_default")]
    pub(crate) time_to_first_token: Histogram,
    #[serde(deserialize_with = "or_default")]
    pub(crate) inter_token: Histogram,
    #[serde(deserialize_with = "or_default")]
    pub(crate) routing: Histogram,
}

/// Counts per bucket, not cumulative. Either empty, or there is one count more than bounds.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(from = "RawHistogram")]
pub(crate) struct Histogram {
    /// Upper bounds in seconds, rising.
    pub(crate) le: Vec<f64>,
    /// Counts by bucket; the last one is of observations above the last bound.
    pub(crate) counts: Vec<u64>,
    /// Sum of all observations, in seconds.
    pub(crate) sum: f64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RawHistogram {
    #[serde(deserialize_with = "or_default")]
    le: Vec<f64>,
    #[serde(deserialize_with = "or_default")]
    counts: Vec<u64>,
    #[serde(deserialize_with = "or_default")]
    sum: f64,
}

impl From<RawHistogram> for Histogram {
    /// An invalid histogram becomes an empty one.
    fn from(raw: RawHistogram) -> Self {
        let bounds_rise = raw.le.windows(2).all(|pair| pair[0] < pair[1]);
        let positive = raw.le.first().is_some_and(|first| *first > 0.0);
        if bounds_rise && positive && raw.counts.len() == raw.le.len() + 1 {
            Self { le: raw.le, counts: raw.counts, sum: raw.sum }
        } else {
            Self::default()
        }
    }
}

/// A rank of a worker.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Worker {
    #[serde(deserialize_with = "text")]
    pub(crate) name: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) ready: bool,
    #[serde(deserialize_with = "text")]
    pub(crate) engine: String,
    #[serde(deserialize_with = "text")]
    pub(crate) version: String,
    #[serde(deserialize_with = "text")]
    pub(crate) role: String,
    pub(crate) events: Option<bool>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) is_out: bool,
    pub(crate) ejections: Option<u64>,
    pub(crate) requests: Option<u64>,
    pub(crate) peers_requests: Option<u64>,
    pub(crate) engine_running: Option<u64>,
    pub(crate) engine_waiting: Option<u64>,
    pub(crate) kv_usage: Option<f64>,
    pub(crate) slowness: Option<f64>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) pools: Vec<Pool>,
    pub(crate) predictions: Option<PredictionAccuracy>,
    pub(crate) transfers: Option<Transfers>,
}

/// One tier of a worker.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Pool {
    #[serde(deserialize_with = "text")]
    pub(crate) tier: String,
    pub(crate) blocks: Option<u64>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) indexed: u64,
}

/// Hand-offs of a worker, as its engine reports them.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Transfers {
    #[serde(deserialize_with = "or_default")]
    pub(crate) bytes_sent: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) blocks_received: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) completed: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) incomplete: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) cancelled: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) leases_expired: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) checksum_failures: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) peers_lost: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) rails: Vec<TransferRail>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) stages: Vec<TransferStage>,
}

/// One transport of a worker.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct TransferRail {
    #[serde(deserialize_with = "text")]
    pub(crate) name: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) bytes: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) retries: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) failures: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) nanoseconds_per_kib: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) is_slow: bool,
}

/// Durations of one part of a worker's hand-offs.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct TransferStage {
    #[serde(deserialize_with = "text")]
    pub(crate) stage: String,
    #[serde(flatten)]
    pub(crate) times: Histogram,
}

/// Predicted and reported cached tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct PredictionAccuracy {
    #[serde(deserialize_with = "or_default")]
    pub(crate) requests: u64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) exact: u64,
}

/// Answer of `GET /kvasir/decisions`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Decisions {
    pub(crate) last: Option<u64>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) decisions: Vec<Decision>,
}

/// A routing decision: the workers of a request, and the reason.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Decision {
    #[serde(deserialize_with = "or_default")]
    pub(crate) sequence: u64,
    pub(crate) unix_ms: Option<u64>,
    #[serde(deserialize_with = "text")]
    pub(crate) worker: String,
    #[serde(deserialize_with = "text")]
    pub(crate) prefill: String,
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) blocks: Option<u64>,
    pub(crate) overlap_blocks: Option<u64>,
    pub(crate) predicted_ms: Option<f64>,
    pub(crate) decided_us: Option<f64>,
    pub(crate) candidates: Option<u64>,
    #[serde(deserialize_with = "text")]
    pub(crate) reason: String,
}

fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(source: D) -> Result<T, D::Error> {
    Option::<T>::deserialize(source).map(Option::unwrap_or_default)
}

fn text<'de, D: Deserializer<'de>>(source: D) -> Result<String, D::Error> {
    Option::<String>::deserialize(source).map(|given| given.as_deref().map(clean).unwrap_or_default())
}

/// Replaces characters that a terminal would take as a command or that hide or reorder text.
pub(crate) fn clean(text: &str) -> String {
    let cleaned = |c: char| if is_harmful(c) { REPLACEMENT } else { c };
    let mut kept: String = text.chars().take(TEXT_CHARS_MAX).map(cleaned).collect();
    if text.chars().nth(TEXT_CHARS_MAX).is_some() {
        kept.pop();
        kept.push('…');
    }
    kept
}

/// Control characters, and Unicode's format and combining characters that change how other characters look.
fn is_harmful(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}'
            | '\u{fff9}'..='\u{fffb}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
            | '\u{300}'..='\u{36f}' | '\u{483}'..='\u{489}' | '\u{1ab0}'..='\u{1aff}'
            | '\u{1dc0}'..='\u{1dff}' | '\u{20d0}'..='\u{20ff}' | '\u{fe20}'..='\u{fe2f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cleaned_wherever_it_comes_in() {
        for (given, cleaned) in [
            ("127.0.0.1:8001", "127.0.0.1:8001"),
            ("grün 模型", "grün 模型"),
            ("a\u{1b}[2Jb", "a\u{fffd}[2Jb"),
            ("a\u{9b}2Jb\r\n\u{7f}", "a\u{fffd}2Jb\u{fffd}\u{fffd}\u{fffd}"),
            ("x\u{202e}y\u{200d}z\u{301}", "x\u{fffd}y\u{fffd}z\u{fffd}"),
        ] {
            assert_eq!(clean(given), cleaned, "{given:?}");
        }
        assert_eq!(clean(&"x".repeat(TEXT_CHARS_MAX)).chars().count(), TEXT_CHARS_MAX);
        let cut = clean(&"x".repeat(TEXT_CHARS_MAX + 1));
        assert_eq!((cut.chars().count(), cut.ends_with("x…")), (TEXT_CHARS_MAX, true));

        let hostile = r#"\u001b]0;owned\u0007"#;
        let body = format!(
            r#"{{"version":"{hostile}","model":"{hostile}","strategy":"{hostile}","workers":[{{"name":"{hostile}",
            "engine":"{hostile}","version":"{hostile}","role":"{hostile}","pools":[{{"tier":"{hostile}"}}]}}]}}"#
        );
        let status: Status = serde_json::from_str(&body).expect("parses");
        let body = format!(
            r#"{{"decisions":[{{"worker":"{hostile}","prefill":"{hostile}","reason":"{hostile}"}}]}}"#
        );
        let decisions: Decisions = serde_json::from_str(&body).expect("parses");
        let shown = format!("{status:?}{decisions:?}");
        assert!(!shown.contains("\\u{1b}") && !shown.contains("\\u{7}"), "{shown}");
        assert_eq!(shown.matches("owned").count(), 11, "every text was there: {shown}");
    }

    #[test]
    fn missing_and_null_are_the_default_and_unknown_is_skipped() {
        let empty: Status = serde_json::from_str("{}").expect("parses");
        assert_eq!(empty, Status::default());
        let nulls = r#"{"version":null,"model":null,"strategy":null,"started_unix":null,"now_unix_ms":null,
            "active":null,"waiting":null,"requests":null,"failed":null,"prompt_tokens":null,
            "index":null,"histograms":{"time_to_first_token":null,"inter_token":{"le":null,"counts":null}},
            "workers":null,"something":[1,{"new":true}]}"#;
        assert_eq!(serde_json::from_str::<Status>(nulls).expect("parses"), Status::default());
        let worker = r#"{"name":"w","ready":true,"kv_usage":null,"slowness":null,"engine":null,"is_out":null,
            "pools":[{"tier":"host","blocks":null,"indexed":null}],"predictions":null}"#;
        let worker: Worker = serde_json::from_str(worker).expect("parses");
        assert_eq!((worker.kv_usage, worker.pools[0].blocks, worker.is_out), (None, None, false));
        let counted: Status = serde_json::from_str(r#"{"requests":7,"active":2}"#).expect("parses");
        assert_eq!((counted.counters.requests, counted.active), (7, Some(2)));
        let decision = r#"{"decisions":[{"prefill":null,"predicted_ms":null,"runner_up":null}],"last":null}"#;
        assert_eq!(serde_json::from_str::<Decisions>(decision).expect("parses").decisions.len(), 1);
        assert!(serde_json::from_str::<Status>("[]").is_err());
    }

    #[test]
    fn what_is_no_histogram_is_empty() {
        let whole: Histogram =
            serde_json::from_str(r#"{"le":[0.1,1],"counts":[1,2,3],"sum":4,"count":6}"#).expect("parses");
        assert_eq!((whole.le.as_slice(), whole.counts.as_slice()), (&[0.1, 1.0][..], &[1, 2, 3][..]));
        for broken in [
            r#"{"le":[0.1,1],"counts":[1,2]}"#,
            r#"{"le":[1,0.1],"counts":[1,2,3]}"#,
            r#"{"le":[0,1],"counts":[1,2,3]}"#,
            r#"{"le":[],"counts":[1]}"#,
            "{}",
        ] {
            let broken: Histogram = serde_json::from_str(broken).expect("parses");
            assert_eq!(broken, Histogram::default());
        }
    }
}
