//! Calculation of the metric value with which a HorizontalPodAutoscaler sets the wanted count. No I/O.
//!
//! Source: `kubernetes/kubernetes` `pkg/controller/podautoscaler/replica_calculator.go`, `GetExternalPerPodMetricReplicas`,
//! for an external metric of type `AverageValue` with target 1:
//!
//! ```text
//! ratio = value ÷ replicas;   replicas stay when 1 − tolerance ≤ ratio ≤ 1 + tolerance, else replicas = ⌈value⌉
//! ```
//!
//! With the default tolerance of 0.1 a fleet of ten or more workers therefore never changes by one. A pool that needs
//! more gets the next higher count that the autoscaler does set. A pool that needs less keeps what it has until the
//! wanted count is far enough below: publishing less than is wanted would break the service level.

/// Tolerance of an autoscaler without `behavior.scaleUp.tolerance` and `behavior.scaleDown.tolerance`
/// (`--horizontal-pod-autoscaler-tolerance`).
pub const DEFAULT_TOLERANCE: f64 = 0.1;

/// Ratios that differ by less are equal: releases of Kubernetes round differently at the limit.
const ROUNDING: f64 = 1e-9;

/// A metric value and its effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HpaMetric {
    /// Value of the metric.
    pub value: u32,
    /// Replicas that the autoscaler will set, without its own minimum, maximum and policies.
    pub expected: u32,
}

fn stays(current: u32, value: u32, tolerance: f64) -> bool {
    (f64::from(value) / f64::from(current) - 1.0).abs() <= tolerance + ROUNDING
}

/// Returns the value for a pool that has `current` workers and should have `wanted`.
#[must_use]
pub fn published(current: u32, wanted: u32, tolerance: f64) -> HpaMetric {
    // The autoscaler ignores an object with zero replicas; KEDA itself activates it.
    if current == 0 || current == wanted {
        return HpaMetric { value: wanted, expected: wanted };
    }
    if wanted < current {
        let is_ignored = stays(current, wanted, tolerance);
        return HpaMetric { value: wanted, expected: if is_ignored { current } else { wanted } };
    }
    let mut value = wanted;
    while stays(current, value, tolerance) {
        value += 1;
    }
    HpaMetric { value, expected: value }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replicas by the autoscaler's own arithmetic, in both forms that Kubernetes has had.
    fn autoscaler(current: u32, value: u32, tolerance: f64) -> [u32; 2] {
        let ratio = f64::from(value) / f64::from(current);
        let old = if (1.0 - ratio).abs() <= tolerance { current } else { value };
        let new = if (1.0 - tolerance) <= ratio && ratio <= 1.0 + tolerance { current } else { value };
        [old, new]
    }

    #[test]
    fn a_need_for_more_is_always_met_and_never_for_less_than_wanted() {
        for current in 1..=400_u32 {
            for wanted in 0..=500_u32 {
                for tolerance in [0.0, DEFAULT_TOLERANCE, 0.25] {
                    let HpaMetric { value, expected } = published(current, wanted, tolerance);
                    let [old, new] = autoscaler(current, value, tolerance);
                    let name = format!("{current} -> {wanted}, tolerance {tolerance}");
                    assert!(old >= wanted && new >= wanted, "{name}: {old} {new}");
                    if wanted > current {
                        assert_eq!((old, new), (expected, expected), "{name}");
                    }
                    assert!(
                        wanted > current || value == wanted,
                        "{name}: a need for less is published as it is"
                    );
                }
            }
        }
    }

    #[test]
    fn with_ten_workers_one_more_is_two_more_unless_the_tolerance_is_zero() {
        let counts = |current, wanted, tolerance| {
            let HpaMetric { value, expected } = published(current, wanted, tolerance);
            (value, expected)
        };
        assert_eq!(counts(3, 4, DEFAULT_TOLERANCE), (4, 4));
        assert_eq!(counts(10, 11, DEFAULT_TOLERANCE), (12, 12));
        assert_eq!(counts(10, 11, 0.0), (11, 11));
        assert_eq!(counts(30, 31, DEFAULT_TOLERANCE), (34, 34));
        assert_eq!(counts(10, 9, DEFAULT_TOLERANCE), (9, 10), "the autoscaler ignores it");
        assert_eq!(counts(10, 8, DEFAULT_TOLERANCE), (8, 8));
        assert_eq!(counts(0, 1, DEFAULT_TOLERANCE), (1, 1));
    }
}
