//! ZMTP 3 as bytes: a decoder that accepts input in pieces of any size, and encoders.
//!
//! ```text
//!   Greeting (64 bytes) ─▶ Flags ─▶ Length (1 or 8 bytes) ─▶ Body ─▶ Flags …
//! ```
//!
//! Invariants: equal bytes give equal events, or the equal error, in whatever pieces they arrive. An announced length is checked
//! against [`Limits`] before memory is reserved for it, and a body's buffer has at most twice the capacity of the received
//! bytes. Until the peer's READY only commands are accepted. An error is final: the position of the next frame is unknown.
//!
//! Sources: RFC 23 "Framing", "Greeting", "NULL mechanism"; RFC 37 for PING, PONG, SUBSCRIBE and CANCEL.

use bytes::{BufMut, Bytes, BytesMut};

use crate::limits::Limits;

/// Length of a greeting: signature 10, version 2, mechanism 20, as-server 1, filler 31.
pub const GREETING_BYTES: usize = 64;
/// Announced version 3.0, so that every peer uses the message form of subscriptions; 3.1 is understood, too.
const VERSION: [u8; 2] = [3, 0];
const VERSION_AT: usize = 10;
const MECHANISM_AT: usize = 12;
const AS_SERVER_AT: usize = 32;
const NULL_MECHANISM: [u8; 20] = *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// Longest context of a PING (RFC 37).
const PING_CONTEXT_MAX: usize = 16;
/// Longest identity (RFC 23).
const IDENTITY_MAX: usize = 255;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// First byte of a subscription in message form (RFC 29).
const SUBSCRIBE: u8 = 1;
/// First byte of a cancellation in message form.
const CANCEL: u8 = 0;

/// Reason for which bytes were refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The greeting is not one.
    #[error("the greeting is malformed at byte {0}")]
    Greeting(usize),
    /// The peer speaks an older protocol.
    #[error("the peer speaks ZMTP {0}, not 3")]
    Version(u8),
    /// The peer requires another mechanism than NULL.
    #[error("the peer's security mechanism is not NULL")]
    Mechanism,
    /// A reserved flag is set, or a command has a successor.
    #[error("the frame's flags {0:#04x} are invalid")]
    Flags(u8),
    /// A frame is too long.
    #[error("a frame of {announced} bytes; the limit is {limit}")]
    FrameBytes {
        /// Announced length.
        announced: u64,
        /// The limit, `frame_bytes_max`.
        limit: usize,
    },
    /// A message is too long.
    #[error("a message of more than {0} bytes")]
    MessageBytes(usize),
    /// A message has too many frames.
    #[error("a message of more than {0} frames")]
    Parts(usize),
    /// A command is too long.
    #[error("a command of {announced} bytes; the limit is {limit}")]
    CommandBytes {
        /// Announced length.
        announced: u64,
        /// The limit, `command_bytes_max`.
        limit: usize,
    },
    /// A command cannot be read.
    #[error("a malformed command: {0}")]
    Command(&'static str),
    /// A message came before READY.
    #[error("a message before the handshake's end")]
    Early,
}

/// Kind of a socket, as READY names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketKind {
    /// Publishes.
    Pub,
    /// Subscribes.
    Sub,
    /// PUB that shows subscriptions to its application.
    XPub,
    /// SUB whose application subscribes by messages.
    XSub,
    /// Sends requests, one at a time.
    Req,
    /// Answers requests, one at a time.
    Rep,
    /// Answers requests of several peers.
    Router,
    /// Sends requests to several peers.
    Dealer,
    /// Any other kind.
    Other,
}

const KINDS: [(&str, SocketKind); 8] = [
    ("PUB", SocketKind::Pub),
    ("SUB", SocketKind::Sub),
    ("XPUB", SocketKind::XPub),
    ("XSUB", SocketKind::XSub),
    ("REQ", SocketKind::Req),
    ("REP", SocketKind::Rep),
    ("ROUTER", SocketKind::Router),
    ("DEALER", SocketKind::Dealer),
];

impl SocketKind {
    fn from_name(name: &[u8]) -> Self {
        KINDS.iter().find(|(known, _)| known.as_bytes() == name).map_or(Self::Other, |(_, kind)| *kind)
    }

    fn name(self) -> &'static str {
        KINDS.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| *name)
    }

    /// Whether a socket of this kind may talk to one of the other kind (RFC 23, "Socket-Type").
    #[must_use]
    pub fn accepts(self, peer: Self) -> bool {
        match self {
            Self::Pub | Self::XPub => matches!(peer, Self::Sub | Self::XSub),
            Self::Sub | Self::XSub => matches!(peer, Self::Pub | Self::XPub),
            Self::Req => matches!(peer, Self::Rep | Self::Router),
            Self::Rep => matches!(peer, Self::Req | Self::Dealer),
            Self::Router => matches!(peer, Self::Req | Self::Dealer | Self::Router),
            Self::Dealer => matches!(peer, Self::Rep | Self::Dealer | Self::Router),
            Self::Other => false,
        }
    }
}

/// A decoded command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// End of the handshake.
    Ready {
        /// Kind of the peer's socket.
        kind: SocketKind,
    },
    /// The peer ends the handshake, with this reason.
    Error(Bytes),
    /// A keep-alive that must be answered with the same context.
    Ping {
        /// Context of at most 16 bytes.
        context: Bytes,
    },
    /// Answer to a PING.
    Pong,
    /// Subscription to a prefix, in the form of ZMTP 3.1.
    Subscribe(Bytes),
    /// Cancellation of a subscription, in the form of ZMTP 3.1.
    Cancel(Bytes),
    /// A command of a later version, to be ignored.
    Unknown,
}

/// A decoded greeting, command or message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The peer's greeting, always first.
    Greeting {
        /// Minor version of the peer's ZMTP 3.
        minor: u8,
    },
    /// A command.
    Command(Command),
    /// A whole message: one frame at least.
    Message(Vec<Bytes>),
}

#[derive(Debug)]
enum Phase {
    Greeting { bytes: [u8; GREETING_BYTES], filled: usize },
    Flags,
    Length { flags: u8, value: u64, missing: usize },
    Body { flags: u8, length: usize, body: Vec<u8> },
    Failed(WireError),
}

/// Decodes a peer's bytes to events.
#[derive(Debug)]
pub struct Decoder {
    limits: Limits,
    phase: Phase,
    is_ready: bool,
    parts: Vec<Bytes>,
    parts_bytes: usize,
}

impl Decoder {
    /// Returns a decoder for the beginning of a connection.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let phase = Phase::Greeting { bytes: [0; GREETING_BYTES], filled: 0 };
        Self { limits, phase, is_ready: false, parts: Vec::new(), parts_bytes: 0 }
    }

    /// Consumes bytes of `input` until an event is complete. `None`: all bytes were consumed.
    ///
    /// # Errors
    ///
    /// The bytes are refused. Every later call returns the same error.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Event>, WireError> {
        let outcome = self.advance(input);
        if let Err(error) = outcome {
            self.parts = Vec::new();
            self.parts_bytes = 0;
            self.phase = Phase::Failed(error);
        }
        outcome
    }

    /// Bytes reserved for a message or command that is not complete yet.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let body = if let Phase::Body { body, .. } = &self.phase { body.capacity() } else { 0 };
        self.parts_bytes + body
    }

    /// Whether a greeting, message or command has begun and is not complete.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        match &self.phase {
            Phase::Greeting { .. } | Phase::Length { .. } | Phase::Body { .. } => true,
            Phase::Flags => !self.parts.is_empty(),
            Phase::Failed(_) => false,
        }
    }

    fn advance(&mut self, input: &mut &[u8]) -> Result<Option<Event>, WireError> {
        loop {
            match &mut self.phase {
                Phase::Failed(error) => return Err(*error),
                Phase::Greeting { bytes, filled } => {
                    let Some(byte) = take_byte(input) else { return Ok(None) };
                    bytes[*filled] = byte;
                    check_greeting(bytes, *filled)?;
                    *filled += 1;
                    if *filled == GREETING_BYTES {
                        let minor = bytes[VERSION_AT + 1];
                        self.phase = Phase::Flags;
                        return Ok(Some(Event::Greeting { minor }));
                    }
                }
                Phase::Flags => {
                    let Some(flags) = take_byte(input) else { return Ok(None) };
                    let is_command = flags & COMMAND != 0;
                    let in_message = !self.parts.is_empty();
                    if flags & !(MORE | LONG | COMMAND) != 0 || is_command && flags & MORE != 0 {
                        return Err(WireError::Flags(flags));
                    }
                    if !is_command && !self.is_ready {
                        return Err(WireError::Early);
                    }
                    if !is_command && in_message && self.parts.len() >= self.limits.parts_max {
                        return Err(WireError::Parts(self.limits.parts_max));
                    }
                    let missing = if flags & LONG != 0 { 8 } else { 1 };
                    self.phase = Phase::Length { flags, value: 0, missing };
                }
                Phase::Length { flags, value, missing } => {
                    let Some(byte) = take_byte(input) else { return Ok(None) };
                    *value = *value << 8 | u64::from(byte);
                    *missing -= 1;
                    if *missing == 0 {
                        let (flags, announced) = (*flags, *value);
                        let length = self.admitted(flags, announced)?;
                        self.phase = Phase::Body { flags, length, body: Vec::new() };
                    }
                }
                Phase::Body { flags, length, body } => {
                    let available = *input;
                    let take = (*length - body.len()).min(available.len());
                    let (now, later) = available.split_at(take);
                    *input = later;
                    reserve(body, take, *length);
                    body.extend_from_slice(now);
                    if body.len() < *length {
                        return Ok(None);
                    }
                    let (flags, body) = (*flags, Bytes::from(std::mem::take(body)));
                    self.phase = Phase::Flags;
                    if let Some(event) = self.framed(flags, body)? {
                        return Ok(Some(event));
                    }
                }
            }
        }
    }

    /// Checks an announced length against the limits.
    fn admitted(&self, flags: u8, announced: u64) -> Result<usize, WireError> {
        let limits = &self.limits;
        let length = usize::try_from(announced).unwrap_or(usize::MAX);
        if flags & COMMAND != 0 {
            let limit = limits.command_bytes_max;
            return if length <= limit {
                Ok(length)
            } else {
                Err(WireError::CommandBytes { announced, limit })
            };
        }
        let limit = limits.frame_bytes_max;
        if length > limit {
            return Err(WireError::FrameBytes { announced, limit });
        }
        // Neither summand exceeds a limit, so that the sum cannot overflow.
        if self.parts_bytes + length > limits.message_bytes_max {
            return Err(WireError::MessageBytes(limits.message_bytes_max));
        }
        Ok(length)
    }

    fn framed(&mut self, flags: u8, body: Bytes) -> Result<Option<Event>, WireError> {
        if flags & COMMAND != 0 {
            let command = parse_command(&body)?;
            let is_ready = matches!(command, Command::Ready { .. });
            if is_ready && self.is_ready {
                return Err(WireError::Command("a second READY"));
            }
            self.is_ready |= is_ready;
            return Ok(Some(Event::Command(command)));
        }
        self.parts_bytes += body.len();
        self.parts.push(body);
        if flags & MORE != 0 {
            return Ok(None);
        }
        self.parts_bytes = 0;
        Ok(Some(Event::Message(std::mem::take(&mut self.parts))))
    }
}

fn take_byte(input: &mut &[u8]) -> Option<u8> {
    let available = *input;
    let (first, rest) = available.split_first()?;
    *input = rest;
    Some(*first)
}

/// Reserves space for `take` more bytes: at most doubled, and never more than the frame's length.
fn reserve(body: &mut Vec<u8>, take: usize, length: usize) {
    if body.capacity() - body.len() < take {
        body.reserve_exact(body.len().max(take).min(length - body.len()));
    }
}

/// Checks the byte that has just arrived against the greeting's format.
fn check_greeting(bytes: &[u8; GREETING_BYTES], at: usize) -> Result<(), WireError> {
    let byte = bytes[at];
    match at {
        0 if byte != 0xFF => Err(WireError::Greeting(at)),
        // The last bit distinguishes ZMTP 2 and 3 from the length of a version 1 frame.
        9 if byte & 1 == 0 => Err(WireError::Greeting(at)),
        VERSION_AT if byte < VERSION[0] => Err(WireError::Version(byte)),
        MECHANISM_AT..AS_SERVER_AT if byte != NULL_MECHANISM[at - MECHANISM_AT] => Err(WireError::Mechanism),
        _ => Ok(()),
    }
}

fn parse_command(body: &Bytes) -> Result<Command, WireError> {
    let short = || WireError::Command("its name is cut off");
    let name_end = 1 + usize::from(*body.first().ok_or_else(short)?);
    let name = body.get(1..name_end).ok_or_else(short)?;
    let rest = body.slice(name_end..);
    match name {
        b"READY" => parse_ready(&rest),
        b"ERROR" => {
            let reason_end =
                1 + usize::from(*rest.first().ok_or(WireError::Command("ERROR without reason"))?);
            Ok(Command::Error(rest.slice(1..reason_end.min(rest.len()))))
        }
        b"PING" => {
            // Two bytes of time to live, which a peer without its own timeout would need, are ignored.
            if rest.len() < 2 || rest.len() > 2 + PING_CONTEXT_MAX {
                return Err(WireError::Command("a PING of a wrong length"));
            }
            Ok(Command::Ping { context: rest.slice(2..) })
        }
        b"PONG" => Ok(Command::Pong),
        b"SUBSCRIBE" => Ok(Command::Subscribe(rest)),
        b"CANCEL" => Ok(Command::Cancel(rest)),
        _ => Ok(Command::Unknown),
    }
}

/// Properties: name length 1, name, value length 4, value.
fn parse_ready(properties: &[u8]) -> Result<Command, WireError> {
    const CUT: WireError = WireError::Command("a property is cut off");
    let mut rest = properties;
    let mut kind = None;
    while let Some((&name_bytes, after)) = rest.split_first() {
        let (name, after) = after.split_at_checked(usize::from(name_bytes)).ok_or(CUT)?;
        let (length, after) = after.split_first_chunk::<4>().ok_or(CUT)?;
        let length = usize::try_from(u32::from_be_bytes(*length)).map_err(|_| CUT)?;
        let (value, after) = after.split_at_checked(length).ok_or(CUT)?;
        // Names of properties are case-insensitive (RFC 23).
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            kind = Some(SocketKind::from_name(value));
        } else if name.eq_ignore_ascii_case(b"Identity") && value.len() > IDENTITY_MAX {
            return Err(WireError::Command("an identity of more than 255 bytes"));
        }
        rest = after;
    }
    kind.map(|kind| Command::Ready { kind }).ok_or(WireError::Command("READY without a socket type"))
}

fn put_frame(out: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => out.put_slice(&[flags, length]),
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(body.len() as u64);
        }
    }
    out.put_slice(body);
}

/// The greeting of every socket here.
#[must_use]
pub fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    (bytes[0], bytes[9]) = (0xFF, 0x7F);
    bytes[VERSION_AT..MECHANISM_AT].copy_from_slice(&VERSION);
    bytes[MECHANISM_AT..AS_SERVER_AT].copy_from_slice(&NULL_MECHANISM);
    bytes
}

/// A command as a frame.
#[must_use]
pub fn command(name: &str, rest: &[u8]) -> Bytes {
    let mut body = BytesMut::with_capacity(1 + name.len() + rest.len());
    body.put_u8(name.len() as u8);
    body.put_slice(name.as_bytes());
    body.put_slice(rest);
    let mut out = BytesMut::with_capacity(body.len() + 9);
    put_frame(&mut out, COMMAND, &body);
    out.freeze()
}

/// READY of a socket of this kind. The empty identity lets the peer choose one.
#[must_use]
pub fn ready(kind: SocketKind) -> Bytes {
    let mut rest = BytesMut::new();
    for (name, value) in [("Socket-Type", kind.name()), ("Identity", "")] {
        rest.put_u8(name.len() as u8);
        rest.put_slice(name.as_bytes());
        rest.put_u32(value.len() as u32);
        rest.put_slice(value.as_bytes());
    }
    command("READY", &rest)
}

/// PING without context and without a time to live.
#[must_use]
pub fn ping() -> Bytes {
    command("PING", &[0, 0])
}

/// The answer to a PING.
#[must_use]
pub fn pong(context: &[u8]) -> Bytes {
    command("PONG", context)
}

/// Subscription to a prefix, in message form.
#[must_use]
pub fn subscribe(prefix: &[u8]) -> Bytes {
    let mut body = BytesMut::with_capacity(1 + prefix.len());
    body.put_u8(SUBSCRIBE);
    body.put_slice(prefix);
    message(&[body.freeze()])
}

/// Encodes a message as frames. A message without parts has no bytes.
#[must_use]
pub fn message(parts: &[Bytes]) -> Bytes {
    let mut out = BytesMut::with_capacity(parts.iter().map(|part| part.len() + 9).sum());
    for (at, part) in parts.iter().enumerate() {
        put_frame(&mut out, if at + 1 < parts.len() { MORE } else { 0 }, part);
    }
    out.freeze()
}

/// A change of subscriptions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SubscriptionChange {
    /// One more subscription to a prefix.
    Subscribe(Bytes),
    /// One subscription less.
    Cancel(Bytes),
}

/// Returns the change that a subscriber's event requests, in either form; `None` for other events.
#[must_use]
pub fn subscription_change(event: &Event) -> Option<SubscriptionChange> {
    match event {
        Event::Command(Command::Subscribe(prefix)) => Some(SubscriptionChange::Subscribe(prefix.clone())),
        Event::Command(Command::Cancel(prefix)) => Some(SubscriptionChange::Cancel(prefix.clone())),
        Event::Message(parts) => match &parts[..] {
            [one] => match one.first() {
                Some(&SUBSCRIBE) => Some(SubscriptionChange::Subscribe(one.slice(1..))),
                Some(&CANCEL) => Some(SubscriptionChange::Cancel(one.slice(1..))),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        frame_bytes_max: 1000,
        message_bytes_max: 1500,
        parts_max: 3,
        command_bytes_max: 300,
        ..Limits::SUBSCRIBER
    };

    /// Decodes bytes in pieces of `cut`; returns the events, and the error that ends them.
    fn decode(bytes: &[u8], cut: usize) -> (Vec<Event>, Option<WireError>) {
        let mut decoder = Decoder::new(LIMITS);
        let (mut events, mut fed) = (Vec::new(), 0);
        for piece in bytes.chunks(cut) {
            let mut input = piece;
            fed += piece.len();
            loop {
                match decoder.next(&mut input) {
                    Ok(Some(event)) => events.push(event),
                    Ok(None) => break,
                    Err(error) => {
                        assert_eq!(decoder.next(&mut &b"\0\0"[..]), Err(error), "an error stays");
                        return (events, Some(error));
                    }
                }
                assert!(decoder.held_bytes() <= 2 * fed);
            }
            assert!(input.is_empty());
            assert!(decoder.held_bytes() <= 2 * fed, "{} held of {fed}", decoder.held_bytes());
        }
        (events, None)
    }

    fn after_handshake(rest: &[u8]) -> Vec<u8> {
        [&greeting()[..], &ready(SocketKind::Sub), rest].concat()
    }

    fn frame(flags: u8, length: u64) -> Vec<u8> {
        [&[flags | LONG][..], &length.to_be_bytes()].concat()
    }

    #[test]
    fn bytes_one_by_one_give_the_same_events_as_all_at_once() {
        let long = Bytes::from(vec![7; 700]);
        let parts = [Bytes::from_static(b"topic"), Bytes::new(), long.clone()];
        let stream = after_handshake(
            &[
                &message(&parts)[..],
                &command("PING", b"\0\x05context"),
                &subscribe(b"kv"),
                &command("SUBSCRIBE", b"kv"),
                &command("CANCEL", b""),
                &command("NOVEL", b"..."),
                &message(&[Bytes::new()]),
                &pong(b""),
            ]
            .concat(),
        );
        let expected = vec![
            Event::Greeting { minor: 0 },
            Event::Command(Command::Ready { kind: SocketKind::Sub }),
            Event::Message(parts.to_vec()),
            Event::Command(Command::Ping { context: Bytes::from_static(b"context") }),
            Event::Message(vec![Bytes::from_static(b"\x01kv")]),
            Event::Command(Command::Subscribe(Bytes::from_static(b"kv"))),
            Event::Command(Command::Cancel(Bytes::new())),
            Event::Command(Command::Unknown),
            Event::Message(vec![Bytes::new()]),
            Event::Command(Command::Pong),
        ];
        for cut in [1, 2, 3, 7, 64, 100, usize::MAX] {
            assert_eq!(decode(&stream, cut), (expected.clone(), None), "pieces of {cut}");
        }
    }

    #[test]
    fn a_greeting_of_libzmq_is_understood() {
        // As libzmq 4.3.5 sends them: version 3.1, and READY of a PUB socket.
        let mut bytes = greeting();
        bytes[8] = 1;
        bytes[11] = 1;
        let ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB";
        let (events, error) = decode(&[&bytes[..], ready].concat(), usize::MAX);
        assert_eq!(error, None);
        assert_eq!(
            events,
            [Event::Greeting { minor: 1 }, Event::Command(Command::Ready { kind: SocketKind::Pub })]
        );
    }

    #[test]
    fn what_a_peer_announces_is_refused_before_memory_is_reserved() {
        let changed = |at: usize, byte: u8| {
            let mut bytes = greeting().to_vec();
            bytes[at] = byte;
            bytes
        };
        let hostile = [&greeting()[..], b"\x06", &[0x7F; 8]].concat();
        assert_eq!(hostile.len(), 73);
        let announced = u64::from_be_bytes([0x7F; 8]);
        let part = [&frame(MORE, 800)[..], &[0; 800]].concat();
        let cases: Vec<(Vec<u8>, WireError)> = vec![
            (hostile, WireError::CommandBytes { announced, limit: 300 }),
            (changed(0, 0), WireError::Greeting(0)),
            (b"GET / HTTP/1.1\r\n".to_vec(), WireError::Greeting(0)),
            (changed(9, 0), WireError::Greeting(9)),
            (changed(10, 2), WireError::Version(2)),
            (changed(12, b'P'), WireError::Mechanism),
            ([&greeting()[..], &frame(0, 1)].concat(), WireError::Early),
            (
                after_handshake(&frame(0, u64::MAX)),
                WireError::FrameBytes { announced: u64::MAX, limit: 1000 },
            ),
            (after_handshake(&frame(0, 1001)), WireError::FrameBytes { announced: 1001, limit: 1000 }),
            (after_handshake(&frame(COMMAND, 301)), WireError::CommandBytes { announced: 301, limit: 300 }),
            (after_handshake(&[&part[..], &frame(0, 701)].concat()), WireError::MessageBytes(1500)),
            (after_handshake(&b"\x01\0".repeat(4)), WireError::Parts(3)),
            (after_handshake(b"\x08\0"), WireError::Flags(8)),
            (after_handshake(b"\x05\0"), WireError::Flags(5)),
            (after_handshake(b"\x04\0"), WireError::Command("its name is cut off")),
            (after_handshake(b"\x04\x02\x05P"), WireError::Command("its name is cut off")),
            (after_handshake(b"\x04\x05\x04PING"), WireError::Command("a PING of a wrong length")),
            (after_handshake(&ready(SocketKind::Sub)), WireError::Command("a second READY")),
            (
                [&greeting()[..], &command("READY", b"\x0bSocket-Type\x7F\0\0\0SUB")].concat(),
                WireError::Command("a property is cut off"),
            ),
            (
                [&greeting()[..], &command("READY", b"")].concat(),
                WireError::Command("READY without a socket type"),
            ),
        ];
        for (bytes, expected) in cases {
            for cut in [1, 5, usize::MAX] {
                assert_eq!(decode(&bytes, cut).1, Some(expected), "pieces of {cut}");
            }
        }
    }

    #[test]
    fn an_announced_length_costs_nothing_until_its_bytes_come() {
        let limits = Limits { frame_bytes_max: 32 << 20, message_bytes_max: 32 << 20, ..LIMITS };
        let mut decoder = Decoder::new(limits);
        let bytes = after_handshake(&frame(0, 32 << 20));
        let mut input = &bytes[..];
        while decoder.next(&mut input).expect("sound").is_some() {}
        assert!(decoder.is_partial());
        assert_eq!(decoder.held_bytes(), 0);
        assert_eq!(decoder.next(&mut &[0_u8; 1000][..]), Ok(None));
        assert!(decoder.held_bytes() <= 2000);
    }

    #[test]
    fn sockets_talk_to_their_counterparts_only() {
        use SocketKind::{Dealer, Other, Pub, Rep, Req, Router, Sub, XPub, XSub};
        let all = [Pub, Sub, XPub, XSub, Req, Rep, Router, Dealer, Other];
        for (kind, partners) in [
            (Pub, &[Sub, XSub][..]),
            (Sub, &[Pub, XPub]),
            (Router, &[Req, Dealer, Router]),
            (Dealer, &[Rep, Dealer, Router]),
            (Other, &[]),
        ] {
            for peer in all {
                assert_eq!(kind.accepts(peer), partners.contains(&peer), "{kind:?} and {peer:?}");
            }
        }
    }
}
