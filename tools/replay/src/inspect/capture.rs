//! Captures as files: lines of JSON, gzip or not, told apart by the first bytes.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::read::MultiGzDecoder;
use serde_json::Value;

/// Magic bytes of gzip: RFC 1952, section 2.3.1.
const GZIP: [u8; 2] = [0x1F, 0x8B];

/// The text of a file.
pub(crate) fn text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("{}", path.display()))?;
    let mut text = String::new();
    if bytes.starts_with(&GZIP) {
        let read = MultiGzDecoder::new(&bytes[..]).read_to_string(&mut text);
        read.with_context(|| format!("{}: not gzip all through", path.display()))?;
    } else {
        text = String::from_utf8(bytes).with_context(|| format!("{}: not text", path.display()))?;
    }
    Ok(text)
}

/// The bytes of hexadecimal digits.
pub(crate) fn bytes_of(hex: &str) -> Result<Vec<u8>, String> {
    if !hex.is_ascii() || !hex.len().is_multiple_of(2) {
        return Err("an odd number of hexadecimal digits".to_owned());
    }
    let byte = |at: usize| {
        u8::from_str_radix(&hex[at..at + 2], 16).map_err(|_| format!("{:?} is not a byte", &hex[at..at + 2]))
    };
    (0..hex.len()).step_by(2).map(byte).collect()
}

/// One message of a capture.
pub(crate) struct Message {
    /// From the frames, or beside the payload.
    pub(crate) sequence: Option<u64>,
    pub(crate) payload: Vec<u8>,
}

/// The message on a line: `payload_hex`, or `frames_hex` with topic, number and payload.
pub(crate) fn message(line: &Value) -> Result<Message, String> {
    if let Some(hex) = line["payload_hex"].as_str() {
        return Ok(Message { sequence: line["seq"].as_u64(), payload: bytes_of(hex)? });
    }
    let frames = line["frames_hex"].as_array().ok_or("neither payload_hex nor frames_hex")?;
    let frames: Vec<Vec<u8>> = frames
        .iter()
        .map(|frame| bytes_of(frame.as_str().ok_or("a frame is not a string")?))
        .collect::<Result<_, String>>()?;
    // The last two, whatever precedes them.
    let [.., number, payload] = &frames[..] else { return Err("fewer than two frames".to_owned()) };
    let number: [u8; 8] = number[..].try_into().map_err(|_| "the number has not eight bytes")?;
    Ok(Message { sequence: Some(u64::from_be_bytes(number)), payload: payload.clone() })
}
