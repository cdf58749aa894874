//! YAML documents.

use serde::Serialize;

/// Formats a value as one document.
pub(crate) fn document(value: &impl Serialize) -> Result<String, String> {
    serde_saphyr::to_string(value).map_err(|error| error.to_string())
}

/// Formats several values as documents of one file.
pub(crate) fn documents(values: &[serde_json::Value]) -> Result<String, String> {
    let texts: Result<Vec<String>, String> = values.iter().map(document).collect();
    Ok(texts?.join("---\n"))
}
