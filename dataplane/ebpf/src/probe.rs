//! The report of `kvasir doctor` about eBPF: one line for each feature.

use std::fmt;

use crate::admission::Admission;
use crate::config::AdmissionConfig;
use crate::engines::EngineProbe;
use crate::error::EbpfError;
use crate::latency::Latency;
use crate::redirect::Redirect;

/// A feature, and whether it would work.
#[derive(Debug)]
pub struct Finding {
    /// Name of the feature in the configuration.
    pub feature: &'static str,
    /// Reason why the feature would not work; `None`: it works.
    pub off: Option<EbpfError>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.off {
            None => write!(f, "{}: works", self.feature),
            Some(off) => write!(f, "{}: {off}", self.feature),
        }
    }
}

/// Loads each feature's programs, so that the kernel verifies them, and unloads them again. Attaches none.
#[must_use]
pub fn probe() -> Vec<Finding> {
    let admission = AdmissionConfig { ports: vec![1], ..AdmissionConfig::default() };
    vec![
        Finding { feature: "redirect", off: Redirect::check().err() },
        Finding { feature: "admission", off: Admission::load(&admission).err() },
        Finding { feature: "latency", off: Latency::check().err() },
        Finding { feature: "engines", off: EngineProbe::check().err() },
    ]
}
