//! What is wrong with bytes from a publisher.

/// The bytes are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireError {
    /// What is wrong.
    pub what: &'static str,
    /// At which byte of the payload.
    pub at: usize,
    /// In which event of the batch.
    pub event: Option<usize>,
    /// In which of its fields.
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
