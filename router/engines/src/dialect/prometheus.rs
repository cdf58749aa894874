//! The few numbers that are read out of an engine's Prometheus text.

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

/// All samples of the metric `name`.
pub(crate) fn samples<'a>(text: &'a str, name: &str) -> impl Iterator<Item = Sample<'a>> {
    text.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => rest.rsplit_once('}')?,
            None if rest.starts_with(' ') => ("", rest),
            // Another metric, whose name is longer.
            None => return None,
        };
        let value = value.split_whitespace().next()?.parse().ok()?;
        Some(Sample { labels, value })
    })
}

/// The first sample of the first of these metrics that is there.
pub(crate) fn first(text: &str, names: &[&str]) -> Option<f64> {
    names.iter().find_map(|name| samples(text, name).next()).map(|sample| sample.value)
}

/// Loads by rank, from metrics whose label `rank_label` numbers the ranks; without the label there is one rank.
pub(crate) fn loads(
    text: &str,
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
    for sample in samples(text, running) {
        put(&sample, &|load| load.running = sample.value as u32);
    }
    for sample in samples(text, waiting) {
        put(&sample, &|load| load.waiting = sample.value as u32);
    }
    if let Some(name) = usage.iter().find(|name| samples(text, name).next().is_some()) {
        for sample in samples(text, name) {
            put(&sample, &|load| load.kv_usage = sample.value);
        }
    }
    loads
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP x\nvllm:num_requests_running{engine=\"0\",model_name=\"a,b\"} 3.0\n\
                        vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 4.0\n\
                        vllm:num_requests_waiting_by_reason{engine=\"0\"} 9.0\n\
                        vllm:num_requests_waiting{engine=\"1\"} 2.0\nplain 5e1\nplainer 6\n\
                        vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nbroken{a=\"b\" 1\n";

    #[test]
    fn samples_are_found_by_whole_name_and_label() {
        assert_eq!(first(TEXT, &["none", "plain"]), Some(50.0));
        assert_eq!(first(TEXT, &["broken"]), None);
        let sample = samples(TEXT, "vllm:num_requests_running").next().expect("a sample");
        assert_eq!(sample.label("model_name"), Some("a,b"));
        assert_eq!(sample.label("name"), None);
        let names = ("vllm:num_requests_running", "vllm:num_requests_waiting");
        let loads = loads(TEXT, "engine", names.0, names.1, &["old", "vllm:kv_cache_usage_perc"]);
        assert_eq!((loads[0].running, loads[0].waiting, loads[0].kv_usage), (3, 0, 0.25));
        assert_eq!((loads[1].running, loads[1].waiting), (4, 2));
    }
}
