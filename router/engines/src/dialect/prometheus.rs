//! The few numbers that are read out of an engine's Prometheus text.

use std::ops::Range;

use memchr::memchr3;

/// One sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sample<'a> {
    labels: &'a str,
    pub(crate) value: f64,
}

impl<'a> Sample<'a> {
    /// A label's value, unless it has an escape.
    pub(crate) fn label(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        loop {
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = after.split_once('"')?;
            if label.trim_start_matches([',', ' ']) == name {
                return Some(value);
            }
            rest = after;
        }
    }
}

/// Most runs of lines of one metric that are read: an engine's text is not trusted.
const GROUPS_MAX: usize = 1 << 16;

/// An engine's text, divided into metrics in one pass: a report reads twenty of its hundreds of metrics.
#[derive(Debug)]
pub(crate) struct Metrics<'a> {
    /// Names, each with its lines. The format asks for all lines of a metric to be together; where they are not, a name
    /// is there several times.
    groups: Vec<(&'a str, &'a str)>,
}

impl<'a> Metrics<'a> {
    pub(crate) fn parse(text: &'a str) -> Self {
        let mut groups: Vec<(&str, Range<usize>)> = Vec::new();
        let mut end = 0;
        for line in text.split_inclusive('\n') {
            let start = end;
            end += line.len();
            let Some(name_end) = memchr3(b'{', b' ', b'\t', line.as_bytes()) else { continue };
            let name = &line[..name_end];
            let has_room = groups.len() < GROUPS_MAX;
            match groups.last_mut() {
                Some((known, lines)) if *known == name && lines.end == start => lines.end = end,
                _ if name.starts_with('#') => {}
                _ if has_room => groups.push((name, start..end)),
                _ => break,
            }
        }
        Self { groups: groups.into_iter().map(|(name, lines)| (name, &text[lines])).collect() }
    }

    /// Whether a metric's name begins with `prefix`.
    pub(crate) fn has_prefix(&self, prefix: &str) -> bool {
        self.groups.iter().any(|(name, _)| name.starts_with(prefix))
    }

    /// All samples of the metric `name`.
    pub(crate) fn samples(&self, name: &str) -> impl Iterator<Item = Sample<'a>> {
        let groups = self.groups.iter().filter(move |(known, _)| *known == name);
        let rests =
            groups.flat_map(|(name, lines)| lines.lines().filter_map(move |line| line.strip_prefix(name)));
        rests.filter_map(|rest| {
            let (labels, value) = match rest.strip_prefix('{') {
                Some(rest) => rest.rsplit_once('}')?,
                None => ("", rest),
            };
            let value = value.split_whitespace().next()?.parse().ok()?;
            Some(Sample { labels, value })
        })
    }

    /// The first sample of the first of these metrics that is there.
    pub(crate) fn first(&self, names: &[&str]) -> Option<f64> {
        names.iter().find_map(|name| self.samples(name).next()).map(|sample| sample.value)
    }

    /// Loads by rank, from metrics whose label `rank_label` numbers the ranks; without the label there is one rank.
    pub(crate) fn loads(
        &self,
        rank_label: &str,
        running: &str,
        waiting: &str,
        usage: &[&str],
    ) -> Vec<super::EngineLoad> {
        /// More ranks than that are not read.
        const RANKS_MAX: usize = 1024;
        let mut loads: Vec<super::EngineLoad> = Vec::new();
        let mut put = |sample: &Sample<'_>, set: &dyn Fn(&mut super::EngineLoad)| {
            let rank = sample.label(rank_label).and_then(|rank| rank.parse().ok()).unwrap_or(0_usize);
            if rank < RANKS_MAX {
                if loads.len() <= rank {
                    loads.resize(rank + 1, super::EngineLoad::default());
                }
                set(&mut loads[rank]);
            }
        };
        for sample in self.samples(running) {
            put(&sample, &|load| load.running = sample.value as u32);
        }
        for sample in self.samples(waiting) {
            put(&sample, &|load| load.waiting = sample.value as u32);
        }
        if let Some(name) = usage.iter().find(|name| self.samples(name).next().is_some()) {
            for sample in self.samples(name) {
                put(&sample, &|load| load.kv_usage = sample.value);
            }
        }
        loads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP x\nvllm:num_requests_running{engine=\"0\",model_name=\"a,b\"} 3.0\n\
                        vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 4.0\n\
                        vllm:num_requests_waiting_by_reason{engine=\"0\"} 9.0\n\
                        vllm:num_requests_waiting{engine=\"1\"} 2.0\nplain 5e1\nplainer 6\ntabbed\t7\nplain 8\n\
                        vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nbroken{a=\"b\" 1\n";

    #[test]
    fn metrics_that_an_engine_makes_up_are_bounded() {
        let line = |number: usize| format!("made_up_{number} 1\n");
        let text: String = (0..=GROUPS_MAX).map(line).collect();
        let metrics = Metrics::parse(&text);
        assert_eq!(metrics.first(&[&format!("made_up_{}", GROUPS_MAX - 1)]), Some(1.0));
        assert_eq!(metrics.first(&[&format!("made_up_{GROUPS_MAX}")]), None);
    }

    #[test]
    fn samples_are_found_by_whole_name_and_label() {
        let metrics = Metrics::parse(TEXT);
        assert_eq!(metrics.first(&["none", "plain"]), Some(50.0));
        assert_eq!(metrics.first(&["broken"]), None);
        assert_eq!(metrics.first(&["tabbed"]), Some(7.0));
        let apart: Vec<f64> = metrics.samples("plain").map(|sample| sample.value).collect();
        assert_eq!(apart, [50.0, 8.0], "lines of one metric that are not together");
        assert!(metrics.has_prefix("vllm:num_") && !metrics.has_prefix("num_"));
        let sample = metrics.samples("vllm:num_requests_running").next().expect("a sample");
        assert_eq!(sample.label("model_name"), Some("a,b"));
        assert_eq!(sample.label("name"), None);
        let names = ("vllm:num_requests_running", "vllm:num_requests_waiting");
        let loads = metrics.loads("engine", names.0, names.1, &["old", "vllm:kv_cache_usage_perc"]);
        assert_eq!((loads[0].running, loads[0].waiting, loads[0].kv_usage), (3, 0, 0.25));
        assert_eq!((loads[1].running, loads[1].waiting), (4, 2));
    }
}
