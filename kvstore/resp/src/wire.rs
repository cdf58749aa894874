//! Parsing of requests.
//!
//! A request is an array of bulk strings, or one line of words ("inline"). The parser consumes the bytes
//! received, keeps its position, and never looks at a byte of a value twice. Arguments of up to [`SHORT_MAX`]
//! bytes are slices of the read buffer. Longer ones are collected in pieces, and [`RequestParser::room`] tells
//! how much to make room for: never more than as much again as was received, so that a declared length alone
//! costs nothing.
//!
//! Own parser rather than `redis-protocol` 6: that one returns a frame only when the whole of it lies in one
//! buffer, so a value of 5 MiB would be parsed again at each read and be copied as the buffer grows.
//!
//! Invariants: equal bytes give equal commands however they are cut; arguments never exceed [`Limits`]; the
//! bytes and the bookkeeping of a large command are reported to the connection
//! ([`RequestParser::charged_bytes`]) as they come; after an error the connection must be closed, because the
//! start of the next command is unknown. Errors have the wording of Redis, since clients match on it.

use bytes::{Buf, Bytes, BytesMut};

use crate::values::Value;

/// Maximum length of an argument that is a slice of the read buffer.
pub const SHORT_MAX: usize = 32 << 10;
/// Bytes of short arguments that a command in progress keeps without being charged for them.
const SHORT_FREE_BYTES: usize = 64 << 10;
/// Cost of keeping one argument, beside its bytes.
const ARGUMENT_BYTES: usize = size_of::<Value>();
/// Maximum length of an inline command.
const LINE_MAX: usize = 64 << 10;
/// Maximum length of a line with a number: sign, 19 digits, line end, and some slack.
const NUMBER_LINE_MAX: usize = 32;
/// Size of a read, except inside a long argument.
pub const READ_BYTES: usize = 64 << 10;
const PIECE_MAX: usize = 1 << 20;

/// Bounds on what a client may declare.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum length of an argument.
    pub value_bytes_max: usize,
    /// Maximum bytes of all arguments of a command.
    pub command_bytes_max: usize,
    /// Maximum number of arguments of a command.
    pub arguments_max: usize,
}

/// A command with its name as argument 0, which always exists.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Command {
    /// Name and arguments.
    pub arguments: Vec<Value>,
    /// Bytes of all arguments.
    pub bytes: usize,
    /// Bytes of the long arguments.
    pub long_bytes: usize,
}

/// Bytes that are not a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The number of arguments is no number or too large.
    #[error("Protocol error: invalid multibulk length")]
    ArgumentCount,
    /// The length of an argument is no number or too large, or the arguments together are.
    #[error("Protocol error: invalid bulk length")]
    ArgumentLength,
    /// An argument does not begin with `$`.
    #[error("Protocol error: expected '$', got '{}'", .0.escape_ascii())]
    ExpectedBulk(u8),
    /// An argument is not followed by the end of a line.
    #[error("Protocol error: expected the end of a line after an argument")]
    ExpectedEnd,
    /// A header is longer than any number.
    #[error("Protocol error: too big mbulk count string")]
    NumberLine,
    /// An inline command is too long.
    #[error("Protocol error: too big inline request")]
    Inline,
    /// An inline command has an open quotation.
    #[error("Protocol error: unbalanced quotes in request")]
    Quotes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Between commands.
    Start,
    /// Before the `$` of an argument.
    Header,
    /// Inside a short argument, with its length.
    Short(usize),
    /// Inside a long argument: bytes still lacking, and bytes that are worth taking at once.
    Long { missing_bytes: usize, piece: usize },
    /// After the last byte of a long argument.
    LongEnd,
}

/// Room that the next read should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadLimit {
    /// Any number of bytes.
    Any,
    /// At most this many bytes.
    AtMost(usize),
}

/// Reads the requests of one connection.
#[derive(Debug)]
pub struct RequestParser {
    limits: Limits,
    state: State,
    expected: usize,
    command: Command,
    value: Value,
    /// Bytes of the short arguments of the command in progress, and [`ARGUMENT_BYTES`] for each argument.
    short_bytes: usize,
    /// The command in progress was abandoned: its bytes are skipped.
    abandoned: bool,
}

impl RequestParser {
    /// Returns a parser at the beginning of a connection.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            state: State::Start,
            expected: 0,
            command: Command::default(),
            value: Value::default(),
            short_bytes: 0,
            abandoned: false,
        }
    }

    /// Takes the next command out of the buffer; `None` when more bytes are needed.
    ///
    /// # Errors
    /// The bytes are not a request within the limits.
    pub fn next(&mut self, buffer: &mut BytesMut) -> Result<Option<Command>, WireError> {
        loop {
            let complete = match self.state {
                State::Start => match buffer.first() {
                    None => return Ok(None),
                    Some(b'*') => self.count(buffer)?,
                    Some(_) => match inline(buffer, self.limits.arguments_max)? {
                        None => return Ok(None),
                        Some(arguments) if arguments.is_empty() => continue,
                        Some(arguments) => {
                            let bytes = arguments.iter().map(Value::len).sum();
                            return Ok(Some(Command { arguments, bytes, long_bytes: 0 }));
                        }
                    },
                },
                State::Header => self.header(buffer)?,
                State::Short(length) => self.short(buffer, length)?,
                State::Long { missing_bytes, piece } => self.long(buffer, missing_bytes, piece),
                State::LongEnd => {
                    let ended = end(buffer)?;
                    if ended {
                        let value = std::mem::take(&mut self.value);
                        self.push(value);
                    }
                    ended
                }
            };
            if !complete {
                return Ok(None);
            }
            if self.state == State::Start && !self.command.arguments.is_empty() {
                self.abandoned = false;
                self.short_bytes = 0;
                return Ok(Some(std::mem::take(&mut self.command)));
            }
        }
    }

    /// Room that the next read should have.
    #[must_use]
    pub fn room(&self, buffered: usize) -> ReadLimit {
        match self.state {
            // The two bytes that end the argument are read along with its last piece.
            State::Long { missing_bytes, piece } if piece >= missing_bytes => {
                ReadLimit::AtMost((missing_bytes + 2).saturating_sub(buffered))
            }
            State::Long { piece, .. } => ReadLimit::AtMost(piece.saturating_sub(buffered)),
            _ => ReadLimit::Any,
        }
    }

    /// Changes the limits from the next header on.
    pub fn limit(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Whether a command has begun and is not complete.
    #[must_use]
    pub fn inside(&self) -> bool {
        self.state != State::Start
    }

    /// Memory of the command in progress that counts against the budget of all connections: the bytes of long arguments
    /// that have come and those that the next read makes room for, and short arguments above a small amount.
    #[must_use]
    pub fn charged_bytes(&self) -> usize {
        let short = self.short_bytes.saturating_sub(SHORT_FREE_BYTES);
        match self.state {
            _ if self.abandoned => 0,
            State::Long { missing_bytes, piece } => self.command.long_bytes - missing_bytes + piece + short,
            _ => self.command.long_bytes + short,
        }
    }

    /// Drops the received bytes of the command in progress, and skips the rest of it. When it is complete, it
    /// is returned with one empty argument. No effect between commands.
    pub fn abandon(&mut self) {
        if self.inside() {
            self.abandoned = true;
            self.short_bytes = 0;
            self.value = Value::default();
            self.command.arguments = Vec::new();
        }
    }

    fn count(&mut self, buffer: &mut BytesMut) -> Result<bool, WireError> {
        let Some(count) = number_line(buffer, WireError::ArgumentCount)? else { return Ok(false) };
        let count = usize::try_from(count.max(0)).map_err(|_| WireError::ArgumentCount)?;
        if count > self.limits.arguments_max {
            return Err(WireError::ArgumentCount);
        }
        if count > 0 {
            self.expected = count;
            self.command.arguments.reserve(count.min(16));
            self.state = State::Header;
        }
        Ok(true)
    }

    fn header(&mut self, buffer: &mut BytesMut) -> Result<bool, WireError> {
        match buffer.first() {
            None => return Ok(false),
            Some(b'$') => {}
            Some(&other) => return Err(WireError::ExpectedBulk(other)),
        }
        let Some(length) = number_line(buffer, WireError::ArgumentLength)? else { return Ok(false) };
        let length = usize::try_from(length).map_err(|_| WireError::ArgumentLength)?;
        let bytes = self.command.bytes.saturating_add(length);
        if length > self.limits.value_bytes_max || bytes > self.limits.command_bytes_max {
            return Err(WireError::ArgumentLength);
        }
        self.command.bytes = bytes;
        self.state = if length <= SHORT_MAX {
            State::Short(length)
        } else {
            self.command.long_bytes += length;
            State::Long { missing_bytes: length, piece: READ_BYTES.min(length) }
        };
        Ok(true)
    }

    fn short(&mut self, buffer: &mut BytesMut, length: usize) -> Result<bool, WireError> {
        if buffer.len() < length + 2 {
            return Ok(false);
        }
        let bytes = buffer.split_to(length).freeze();
        end(buffer)?;
        self.short_bytes += length;
        self.push(Value::from(bytes));
        Ok(true)
    }

    fn long(&mut self, buffer: &mut BytesMut, missing_bytes: usize, piece: usize) -> bool {
        let take = buffer.len().min(missing_bytes);
        if self.abandoned && take > 0 {
            buffer.advance(take);
            let missing_bytes = missing_bytes - take;
            self.state = match missing_bytes {
                0 => State::LongEnd,
                _ => State::Long { missing_bytes, piece: READ_BYTES.min(missing_bytes) },
            };
            return true;
        }
        // Bytes that came along with the header are taken at once, whatever their number.
        let first = self.value.is_empty() && take > 0;
        if take < missing_bytes && take < piece && !first {
            return false;
        }
        self.value.push(buffer.split_to(take).freeze());
        let missing_bytes = missing_bytes - take;
        self.state = match missing_bytes {
            0 => State::LongEnd,
            _ => State::Long {
                missing_bytes,
                piece: self.value.len().clamp(READ_BYTES, PIECE_MAX).min(missing_bytes),
            },
        };
        true
    }

    fn push(&mut self, value: Value) {
        if !self.abandoned {
            self.short_bytes += ARGUMENT_BYTES;
            self.command.arguments.push(value);
        } else if self.command.arguments.is_empty() {
            // A command has at least one argument.
            self.command.arguments.push(Value::default());
        }
        self.expected -= 1;
        self.state = if self.expected == 0 { State::Start } else { State::Header };
    }
}

/// Takes the end of a line; `false` when it is not complete yet.
fn end(buffer: &mut BytesMut) -> Result<bool, WireError> {
    if buffer.len() < 2 {
        return Ok(false);
    }
    if &buffer[..2] != b"\r\n" {
        return Err(WireError::ExpectedEnd);
    }
    buffer.advance(2);
    Ok(true)
}

/// Takes a line of one byte and a number.
fn number_line(buffer: &mut BytesMut, not_a_number: WireError) -> Result<Option<i64>, WireError> {
    let seen = &buffer[..buffer.len().min(NUMBER_LINE_MAX)];
    let Some(at) = memchr::memchr(b'\n', seen) else {
        return if seen.len() < NUMBER_LINE_MAX { Ok(None) } else { Err(WireError::NumberLine) };
    };
    let digits = seen[1..at].strip_suffix(b"\r").ok_or(not_a_number)?;
    let number = number(digits).ok_or(not_a_number)?;
    buffer.advance(at + 1);
    Ok(Some(number))
}

/// Parses a decimal number as Redis writes it: an optional minus sign and digits, nothing else.
#[must_use]
pub fn number(digits: &[u8]) -> Option<i64> {
    let (negative, digits) = match digits.strip_prefix(b"-") {
        Some(digits) => (true, digits),
        None => (false, digits),
    };
    if digits.is_empty() || digits.len() > 19 {
        return None;
    }
    // Summed as a negative number, which also has room for the smallest one.
    let sum = digits.iter().try_fold(0_i64, |sum, digit| {
        let digit = digit.is_ascii_digit().then(|| i64::from(digit - b'0'))?;
        sum.checked_mul(10)?.checked_sub(digit)
    })?;
    if negative { Some(sum) } else { sum.checked_neg() }
}

/// Takes a line of words, which may be quoted as in a shell: `"…"` with escapes or `'…'`.
fn inline(buffer: &mut BytesMut, arguments_max: usize) -> Result<Option<Vec<Value>>, WireError> {
    let seen = &buffer[..buffer.len().min(LINE_MAX)];
    let Some(at) = memchr::memchr(b'\n', seen) else {
        return if seen.len() < LINE_MAX { Ok(None) } else { Err(WireError::Inline) };
    };
    let line = buffer.split_to(at + 1);
    let mut rest = line[..at].strip_suffix(b"\r").unwrap_or(&line[..at]);
    let mut arguments = Vec::new();
    loop {
        rest = rest.trim_ascii_start();
        if rest.is_empty() {
            return Ok(Some(arguments));
        }
        if arguments.len() == arguments_max {
            return Err(WireError::ArgumentCount);
        }
        let (word, after) = word(rest)?;
        arguments.push(Value::from(Bytes::from(word)));
        rest = after;
    }
}

fn word(line: &[u8]) -> Result<(Vec<u8>, &[u8]), WireError> {
    let mut word = Vec::new();
    let mut at = 0;
    let mut quote = None;
    while let Some(&byte) = line.get(at) {
        at += 1;
        match (quote, byte) {
            (Some(open), _) if byte == open => {
                // A closing quotation mark ends the word.
                let after = &line[at..];
                let apart = after.first().is_none_or(u8::is_ascii_whitespace);
                return if apart { Ok((word, after)) } else { Err(WireError::Quotes) };
            }
            (Some(b'"'), b'\\') => {
                let (byte, taken) = escape(&line[at..]).ok_or(WireError::Quotes)?;
                word.push(byte);
                at += taken;
            }
            (Some(b'\''), b'\\') if line.get(at) == Some(&b'\'') => {
                word.push(b'\'');
                at += 1;
            }
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, _) if byte.is_ascii_whitespace() => return Ok((word, &line[at..])),
            _ => word.push(byte),
        }
    }
    if quote.is_some() { Err(WireError::Quotes) } else { Ok((word, &[])) }
}

/// Decodes an escape between double quotation marks: the byte, and the length of the sequence after the
/// backslash.
fn escape(after: &[u8]) -> Option<(u8, usize)> {
    let hex = |at: usize| after.get(at).and_then(|&digit| char::from(digit).to_digit(16));
    Some(match *after.first()? {
        b'x' => match (hex(1), hex(2)) {
            (Some(high), Some(low)) => (u8::try_from(high * 16 + low).ok()?, 3),
            _ => (b'x', 1),
        },
        b'n' => (b'\n', 1),
        b'r' => (b'\r', 1),
        b't' => (b'\t', 1),
        b'b' => (8, 1),
        b'a' => (7, 1),
        other => (other, 1),
    })
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
