//! Faults on demand: armed by kind, drawn by a seeded generator, counted when they occur.
//!
//! On the hot path: one relaxed load while nothing is armed.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Deserialize;

use crate::MockError;

/// Kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// Each step takes `millis` longer.
    Slow,
    /// A request is accepted and never answered.
    Hang,
    /// An output stops after `tokens` tokens; the connection stays open.
    Stall,
    /// The connection is cut after `tokens` tokens; without a stream, it is cut before the answer.
    DieMidStream,
    /// Connections are reset: new ones when accepted, open ones at their next request.
    Refuse,
    /// A request is answered 500.
    Error,
    /// A request is answered 503.
    Overloaded,
    /// An answer is not JSON.
    Corrupt,
    /// A batch of KV events is numbered but not published; the replay has it.
    DropEvents,
    /// The reported number of cached tokens is wrong.
    WrongCached,
    /// The health check is answered after `millis`.
    SlowHealth,
    /// Metrics and the server's description are answered after `millis`.
    SlowMetrics,
}

impl FaultKind {
    /// All kinds, in the order of their counters.
    pub const ALL: [Self; 12] = [
        Self::Slow,
        Self::Hang,
        Self::Stall,
        Self::DieMidStream,
        Self::Refuse,
        Self::Error,
        Self::Overloaded,
        Self::Corrupt,
        Self::DropEvents,
        Self::WrongCached,
        Self::SlowHealth,
        Self::SlowMetrics,
    ];

    /// Name in the JSON form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Slow => "slow",
            Self::Hang => "hang",
            Self::Stall => "stall",
            Self::DieMidStream => "die_mid_stream",
            Self::Refuse => "refuse",
            Self::Error => "error",
            Self::Overloaded => "overloaded",
            Self::Corrupt => "corrupt",
            Self::DropEvents => "drop_events",
            Self::WrongCached => "wrong_cached",
            Self::SlowHealth => "slow_health",
            Self::SlowMetrics => "slow_metrics",
        }
    }
}

/// One fault, as armed by [`Mock::fault`](crate::Mock::fault) or `POST /mock/faults`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Kind of fault.
    pub kind: FaultKind,
    /// Probability that the fault occurs, 0 to 1. 0 disarms the kind.
    #[serde(default = "always")]
    pub probability: f64,
    /// Most occurrences of the fault; `None`: no limit.
    #[serde(default)]
    pub count: Option<u64>,
    /// Delay in milliseconds, for `slow`, `slow_health` and `slow_metrics`.
    #[serde(default)]
    pub millis: u64,
    /// Tokens sent before the fault, for `stall` and `die_mid_stream`.
    #[serde(default = "one_token")]
    pub tokens: usize,
}

fn always() -> f64 {
    1.0
}

fn one_token() -> usize {
    1
}

impl Fault {
    /// A fault that always happens.
    #[must_use]
    pub fn new(kind: FaultKind) -> Self {
        Self { kind, probability: 1.0, count: None, millis: 0, tokens: 1 }
    }

    /// Delay of a step or an answer.
    #[must_use]
    pub fn delay(&self) -> Duration {
        Duration::from_millis(self.millis)
    }
}

/// The armed faults of one worker, at most one of each kind.
#[derive(Debug)]
pub(crate) struct Faults {
    /// One bit per kind. Relaxed: a fault that is armed during a request need not affect it.
    armed: AtomicU32,
    shown: [AtomicU64; FaultKind::ALL.len()],
    state: Mutex<FaultState>,
}

#[derive(Debug)]
struct FaultState {
    random: u64,
    faults: [Option<Fault>; FaultKind::ALL.len()],
}

impl Faults {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            armed: AtomicU32::new(0),
            shown: Default::default(),
            state: Mutex::new(FaultState { random: seed, faults: Default::default() }),
        }
    }

    /// Arms a fault, replacing the one of its kind.
    pub(crate) fn arm(&self, fault: Fault) -> Result<(), MockError> {
        if !(0.0..=1.0).contains(&fault.probability) {
            return Err(MockError::Config(format!("`probability` is {}, not 0 to 1", fault.probability)));
        }
        let kind = fault.kind as usize;
        let is_on = fault.probability > 0.0 && fault.count != Some(0);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.faults[kind] = is_on.then_some(fault);
        self.set(&state);
        Ok(())
    }

    pub(crate) fn heal(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.faults = Default::default();
        self.set(&state);
    }

    fn set(&self, state: &FaultState) {
        let bits = state.faults.iter().enumerate().map(|(kind, fault)| u32::from(fault.is_some()) << kind);
        self.armed.store(bits.sum(), Ordering::Relaxed);
    }

    /// Whether any fault is armed.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.armed.load(Ordering::Relaxed) != 0
    }

    /// Whether a fault of this kind is armed, without drawing it.
    #[inline]
    pub(crate) fn is_armed(&self, kind: FaultKind) -> bool {
        self.armed.load(Ordering::Relaxed) & (1 << kind as u32) != 0
    }

    /// Draws the fault. `Some`: the fault was armed and drawn, and counts as occurred.
    pub(crate) fn draw(&self, kind: FaultKind) -> Option<Fault> {
        if !self.is_armed(kind) {
            return None;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let draw = split_mix(&mut state.random) >> 11;
        let slot = state.faults[kind as usize].as_mut()?;
        if (draw as f64) >= slot.probability * (1_u64 << 53) as f64 {
            return None;
        }
        let fault = slot.clone();
        if let Some(count) = &mut slot.count {
            *count = count.saturating_sub(1);
            if *count == 0 {
                state.faults[kind as usize] = None;
                self.set(&state);
            }
        }
        self.shown[kind as usize].fetch_add(1, Ordering::Relaxed);
        Some(fault)
    }

    /// Number of occurrences of each kind.
    pub(crate) fn shown(&self) -> Vec<(&'static str, u64)> {
        let count = |kind: FaultKind| self.shown[kind as usize].load(Ordering::Relaxed);
        FaultKind::ALL.iter().map(|&kind| (kind.name(), count(kind))).collect()
    }
}

/// The generator SplitMix64 (Steele, Lea, Flood 2014).
pub(crate) fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mix(*state)
}

/// The finaliser of SplitMix64.
#[inline]
pub(crate) fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_drawn_by_seed_counted_and_used_up() {
        let draws = |seed| {
            let faults = Faults::new(seed);
            faults.arm(Fault { probability: 0.5, ..Fault::new(FaultKind::Error) }).expect("armed");
            (0..64).map(|_| faults.draw(FaultKind::Error).is_some()).collect::<Vec<_>>()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
        let faults = Faults::new(0);
        faults.arm(Fault { count: Some(2), ..Fault::new(FaultKind::Hang) }).expect("armed");
        let shown = (0..5).filter(|_| faults.draw(FaultKind::Hang).is_some()).count();
        assert_eq!((shown, faults.any()), (2, false));
        assert_eq!(faults.shown()[FaultKind::Hang as usize], ("hang", 2));
        faults.arm(Fault::new(FaultKind::Slow)).expect("armed");
        assert!(faults.is_armed(FaultKind::Slow));
        faults.heal();
        assert!(!faults.any());
        assert!(faults.arm(Fault { probability: 1.5, ..Fault::new(FaultKind::Slow) }).is_err());
        for kind in FaultKind::ALL {
            let json = format!("{{\"kind\":\"{}\"}}", kind.name());
            assert_eq!(serde_json::from_str::<Fault>(&json).expect(&json).kind, kind);
        }
    }
}
