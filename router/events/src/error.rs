//! Errors in a publisher's bytes.

/// A payload cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireError {
    /// Description of the error.
    pub what: &'static str,
    /// Byte offset in the payload.
    pub at: usize,
    /// Number of the event in the batch.
    pub event: Option<usize>,
    /// Name of the event's field.
    pub field: Option<&'static str>,
}

impl std::fmt::Display for WireError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(event) = self.event {
            write!(formatter, "event {event}: ")?;
        }
        if let Some(field) = self.field {
            write!(formatter, "{field}: ")?;
        }
        write!(formatter, "{} (byte {})", self.what, self.at)
    }
}

impl std::error::Error for WireError {}
