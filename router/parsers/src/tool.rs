//! The functions that a request offers, as far as parsing needs them.

use serde_json::Value;

/// One function: its name, and the JSON schema of its arguments. The schema only decides the types of
/// arguments in the XML-like formats; no format rejects a call because of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// The name that the model writes.
    pub name: String,
    /// The schema (`parameters`), or null.
    pub parameters: Value,
}

impl Tool {
    /// A tool from its parts.
    #[must_use]
    pub fn new(name: impl Into<String>, parameters: Value) -> Self {
        Self { name: name.into(), parameters }
    }

    /// A tool from an entry of the `tools` list of a chat completion request, or from a bare function.
    /// `None` when it has no name.
    #[must_use]
    pub fn from_request(entry: &Value) -> Option<Self> {
        let function = entry.get("function").unwrap_or(entry);
        let name = function.get("name")?.as_str()?;
        Some(Self::new(name, function.get("parameters").cloned().unwrap_or(Value::Null)))
    }

    /// The schema of one argument.
    pub(crate) fn argument(&self, name: &str) -> Option<&Value> {
        let properties = self.parameters.get("properties")?;
        let schema = properties.get(name)?;
        match schema.get("$ref").and_then(Value::as_str) {
            // Pydantic writes nested types as references into the same document.
            Some(reference) => self.parameters.pointer(reference.strip_prefix('#')?),
            None => Some(schema),
        }
    }
}
