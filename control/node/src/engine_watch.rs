//! Samples of kernel statistics of the engines on this machine, which explain slow answers.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use dataplane_ebpf::{EbpfError, EngineProbe, EngineTimes, Histogram};
use serde_json::{Value, json};

use crate::engine_processes::Machine;

/// Interval between searches for the engines' processes, which may restart or fork.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// p99 from which on a time is reported as a reason for slow answers.
const RUN_QUEUE_SLOW: Duration = Duration::from_millis(10);
const READ_SLOW: Duration = Duration::from_millis(50);
const DISK_SLOW: Duration = Duration::from_millis(50);
/// Retransmitted segments per second from which on the network is reported.
const RESENT_SLOW: f64 = 10.0;
/// Fewest events for a p99.
const EVENTS_MIN: u64 = 5;

/// An engine found on this machine.
struct Engine {
    name: String,
    processes: usize,
    before: EngineTimes,
}

/// The watched engines.
pub(crate) struct EngineWatch {
    probe: EngineProbe,
    /// Engines to search for: the gateway's name for the engine, and its address.
    wanted: Vec<(String, (IpAddr, u16))>,
    /// Engines found on this machine, by their index in the probe.
    engines: Vec<Option<Engine>>,
    looked: Option<Instant>,
    sampled: Instant,
}

/// Kernel times of an engine between two samples.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) processes: usize,
    pub(crate) seconds: f64,
    pub(crate) times: EngineTimes,
}

impl EngineWatch {
    pub(crate) fn attach() -> Result<Self, EbpfError> {
        let probe = EngineProbe::attach()?;
        let engines = (0..EngineProbe::ENGINES_MAX).map(|_| None).collect();
        Ok(Self { probe, wanted: Vec::new(), engines, looked: None, sampled: Instant::now() })
    }

    /// Sets the engines to watch, as far as they are on this machine and the probe has free slots.
    pub(crate) fn set(&mut self, engines: Vec<(String, (IpAddr, u16))>) {
        if self.wanted != engines {
            (self.wanted, self.looked) = (engines, None);
        }
    }

    /// Returns the times of each engine of this machine since the last sample.
    pub(crate) fn sample(&mut self) -> Result<Vec<Sample>, EbpfError> {
        if self.looked.is_none_or(|looked| looked.elapsed() >= CHECK_INTERVAL) {
            self.looked = Some(Instant::now());
            self.look()?;
        }
        let seconds = std::mem::replace(&mut self.sampled, Instant::now()).elapsed().as_secs_f64();
        let mut samples = Vec::new();
        for (number, engine) in self.engines.iter_mut().enumerate() {
            let Some(engine) = engine else { continue };
            let now = self.probe.times(number)?;
            let times = now.since(&engine.before);
            engine.before = now;
            samples.push(Sample { name: engine.name.clone(), processes: engine.processes, seconds, times });
        }
        Ok(samples)
    }

    /// Searches for the engines and their processes, which may have appeared, restarted or forked.
    fn look(&mut self) -> Result<(), EbpfError> {
        let machine = Machine::read();
        let here =
            self.wanted.iter().filter_map(|(name, (host, port))| Some((name, machine.engine(*host, *port)?)));
        let here: Vec<_> = here.take(EngineProbe::ENGINES_MAX).collect();
        for (number, place) in self.engines.iter_mut().enumerate() {
            if place.as_ref().is_some_and(|engine| !here.iter().any(|(name, _)| **name == engine.name)) {
                self.probe.unwatch(number);
                *place = None;
            }
        }
        for (name, found) in here {
            let is_its = |engine: &Option<Engine>| engine.as_ref().is_some_and(|engine| engine.name == *name);
            let free = || self.engines.iter().position(Option::is_none);
            let Some(number) = self.engines.iter().position(is_its).or_else(free) else { break };
            self.probe.watch(number, &found)?;
            // Another engine may have used this index before: its counts are the baseline.
            let before = match self.engines[number].take() {
                Some(engine) => engine.before,
                None => self.probe.times(number)?,
            };
            self.engines[number] =
                Some(Engine { name: name.clone(), processes: found.processes.len(), before });
        }
        Ok(())
    }
}

fn p99(histogram: &Histogram) -> Option<Duration> {
    histogram.quantile(0.99).filter(|_| histogram.count() >= EVENTS_MIN)
}

fn millis(time: Option<Duration>) -> Value {
    time.map_or(Value::Null, |time| json!((time.as_secs_f64() * 1e6).round() / 1e3))
}

impl Sample {
    fn resent_per_second(&self) -> f64 {
        self.times.retransmits as f64 / self.seconds.max(1e-3)
    }

    /// Explains why the engine's answers are late, from the kernel's statistics; empty if these show no
    /// reason.
    pub(crate) fn why(&self) -> String {
        let mut reasons = Vec::new();
        let mut slow = |histogram: &Histogram, from: Duration, text: &str| {
            if let Some(time) = p99(histogram).filter(|time| *time >= from) {
                reasons.push(format!("{text} {:.0} ms", time.as_secs_f64() * 1e3));
            }
        };
        slow(&self.times.run_queue, RUN_QUEUE_SLOW, "its threads wait for a processor for");
        slow(&self.times.read_late, READ_SLOW, "its server reads requests after");
        slow(&self.times.disk_read, DISK_SLOW, "its disk reads take");
        if self.resent_per_second() >= RESENT_SLOW {
            reasons.push(format!("{:.0} segments/s are sent again", self.resent_per_second()));
        }
        reasons.join("; ")
    }

    /// Returns the sample in the format of the gateway's API.
    pub(crate) fn to_json(&self) -> Value {
        let times = &self.times;
        json!({
            "processes": self.processes,
            "requests": times.first_byte.count(),
            "first_byte_p50_ms": millis(times.first_byte.quantile(0.5)),
            "first_byte_p99_ms": millis(p99(&times.first_byte)),
            "read_late_p99_ms": millis(p99(&times.read_late)),
            "run_queue_p99_ms": millis(p99(&times.run_queue)),
            "disk_read_p99_ms": millis(p99(&times.disk_read)),
            "resent_per_second": self.resent_per_second(),
            "why": self.why(),
        })
    }
}

/// Formats the samples as a table.
pub(crate) fn table(samples: &[Sample]) -> String {
    let head = [
        "ENGINE",
        "PROCESSES",
        "REQUESTS/S",
        "FIRST BYTE p50",
        "p99",
        "READ p99",
        "RUN QUEUE p99",
        "DISK p99",
        "RESENT/S",
        "WHY",
    ];
    let time = |time: Option<Duration>| {
        time.map_or("-".to_owned(), |time| format!("{:.2} ms", time.as_secs_f64() * 1e3))
    };
    let row = |sample: &Sample| {
        let times = &sample.times;
        [
            sample.name.clone(),
            sample.processes.to_string(),
            format!("{:.1}", times.first_byte.count() as f64 / sample.seconds.max(1e-3)),
            time(times.first_byte.quantile(0.5)),
            time(p99(&times.first_byte)),
            time(p99(&times.read_late)),
            time(p99(&times.run_queue)),
            time(p99(&times.disk_read)),
            format!("{:.1}", sample.resent_per_second()),
            if sample.why().is_empty() { "-".to_owned() } else { sample.why() },
        ]
    };
    let rows: Vec<[String; 10]> =
        std::iter::once(head.map(str::to_owned)).chain(samples.iter().map(row)).collect();
    let widths: [usize; 10] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let line = |row: &[String; 10]| {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Sample {
        let mut times = EngineTimes::default();
        for _ in 0..10 {
            times.first_byte.record(Duration::from_millis(80));
            times.run_queue.record(Duration::from_millis(40));
            times.read_late.record(Duration::from_millis(1));
        }
        times.disk_read.record(Duration::from_secs(9));
        Sample { name: "a:1".to_owned(), processes: 3, seconds: 2.0, times }
    }

    #[test]
    fn what_is_slow_is_named_and_few_events_say_nothing() {
        let mut sample = sample();
        let why = sample.why();
        assert!(why.starts_with("its threads wait for a processor for ") && !why.contains(';'), "{why}");
        let told = sample.to_json();
        assert_eq!(
            (&told["requests"], &told["disk_read_p99_ms"], &told["why"]),
            (&json!(10), &Value::Null, &json!(why))
        );
        sample.times = EngineTimes { retransmits: 30, ..EngineTimes::default() };
        assert_eq!(sample.why(), "15 segments/s are sent again");
        sample.times.retransmits = 0;
        assert_eq!(sample.why(), "");
    }

    #[test]
    fn a_table_has_a_line_for_each_engine() {
        let shown = table(&[sample()]);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].find("WHY"), lines[1].find("its threads"));
        assert!(lines[1].starts_with("a:1") && lines[1].contains(" 5.0 "), "{}", lines[1]);
    }
}
