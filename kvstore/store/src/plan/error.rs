//! What a configuration can get wrong.

/// A setting is out of its range.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// A setting lies outside its range.
    #[error("plan configuration: {key} is {value}, outside {low} … {high}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// Its value.
        value: f64,
        /// Least value.
        low: f64,
        /// Greatest value.
        high: f64,
    },
}

/// Checks one setting.
pub(crate) fn in_range(key: &'static str, value: f64, low: f64, high: f64) -> Result<(), PlanError> {
    if (low..=high).contains(&value) { Ok(()) } else { Err(PlanError::OutOfRange { key, value, low, high }) }
}
