//! Azure's traces of LLM inference (Patel et al., Splitwise, ISCA'24): `TIMESTAMP,ContextTokens,GeneratedTokens`, one
//! request a line, after a line of headings.

use std::path::Path;

use jiff::civil::DateTime;

use crate::mooncake::{LENGTH_MAX, TraceError};

/// The headings.
pub const HEADINGS: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// One request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Request {
    /// Seconds after the first.
    pub at: f64,
    /// Prompt tokens.
    pub prompt: usize,
    /// Generated tokens.
    pub output: usize,
}

/// Reads a trace; requests come out by time.
pub fn read(path: &Path) -> Result<Vec<Request>, TraceError> {
    let shown = path.display().to_string();
    let text =
        std::fs::read_to_string(path).map_err(|error| TraceError::File { path: shown.clone(), error })?;
    let mut first = None;
    let mut requests = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || (at == 0 && line.trim_start_matches('\u{feff}') == HEADINGS) {
            continue;
        }
        let wrong = |problem: String| TraceError::Line { path: shown.clone(), line: at + 1, problem };
        let fields: Vec<&str> = line.split(',').collect();
        let [time, prompt, output] = fields[..] else {
            return Err(wrong(format!("{} fields, not 3: {HEADINGS}", fields.len())));
        };
        let time: DateTime = time.parse().map_err(|error| wrong(format!("{time:?} is no time: {error}")))?;
        let tokens = |text: &str| match text.parse::<usize>() {
            Ok(tokens) if tokens <= LENGTH_MAX => Ok(tokens),
            _ => Err(wrong(format!("{text:?} is no number of tokens"))),
        };
        let since = time.duration_since(*first.get_or_insert(time)).as_secs_f64();
        requests.push(Request { at: since, prompt: tokens(prompt)?, output: tokens(output)? });
    }
    requests.sort_by(|a, b| a.at.total_cmp(&b.at));
    // One may be before the first line's.
    let begin = requests.first().map_or(0.0, |request| request.at);
    requests.iter_mut().for_each(|request| request.at -= begin);
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(name: &str, text: &str) -> Result<Vec<Request>, String> {
        let file = std::env::temp_dir().join(format!("kvasir-azure-{name}-{}.csv", std::process::id()));
        std::fs::write(&file, text).expect("a file");
        let read = read(&file).map_err(|error| error.to_string());
        std::fs::remove_file(&file).expect("removed");
        read
    }

    #[test]
    fn times_count_from_the_first_request() {
        let text = format!(
            "{HEADINGS}\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:03.4799600,1,2\n2023-11-16 \
             18:18:03.4799600,3,4\n"
        );
        let requests = read_text("times", &text).expect("a trace");
        let at: Vec<f64> = requests.iter().map(|request| request.at).collect();
        assert!((at[0]).abs() < 1e-9 && (at[1] - 0.5).abs() < 1e-9 && (at[2] - 60.0).abs() < 1e-9, "{at:?}");
        assert_eq!((requests[1].prompt, requests[1].output), (4808, 10));
    }

    #[test]
    fn a_mistake_is_told_with_its_line() {
        for (name, line, part) in [
            ("time", "yesterday,1,2", "is no time"),
            ("tokens", "2023-11-16 18:17:03,-1,2", "\"-1\" is no number of tokens"),
            ("fields", "2023-11-16 18:17:03,1", "2 fields"),
        ] {
            let error = read_text(name, &format!("{HEADINGS}\n{line}\n")).expect_err(line);
            assert!(error.contains("line 2") && error.contains(part), "{error}");
        }
    }
}
