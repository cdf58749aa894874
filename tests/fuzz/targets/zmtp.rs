//! Bytes of a ZMQ peer: the same events, or the same error, however the bytes are split; within the limits;
//! and little memory for lengths that are only announced. Decoded values can be encoded and decoded again.

#![no_main]

use router_zmtp::Limits;
use router_zmtp::wire::{self, Decoder, Event, SocketKind, WireError};

const LIMITS: Limits = Limits {
    frame_bytes_max: 1500,
    message_bytes_max: 2500,
    parts_max: 5,
    command_bytes_max: 400,
    ..Limits::SUBSCRIBER
};

fn decode(bytes: &[u8], cut: usize) -> (Vec<Event>, Option<WireError>) {
    let mut decoder = Decoder::new(LIMITS);
    let (mut events, mut fed) = (Vec::new(), 0);
    for piece in bytes.chunks(cut) {
        fed += piece.len();
        let mut input = piece;
        loop {
            match decoder.next(&mut input) {
                Ok(Some(event)) => {
                    if let Event::Message(parts) = &event {
                        assert!(!parts.is_empty() && parts.len() <= LIMITS.parts_max);
                        let sum: usize = parts.iter().map(|part| part.len()).sum();
                        assert!(sum <= LIMITS.message_bytes_max);
                    }
                    events.push(event);
                }
                Ok(None) => break,
                Err(error) => return (events, Some(error)),
            }
        }
        assert!(input.is_empty() && decoder.held_bytes() <= 2 * fed);
        // A command may occur between two frames of a message.
        assert!(decoder.held_bytes() <= LIMITS.message_bytes_max + LIMITS.command_bytes_max);
    }
    (events, None)
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((&first, rest)) = input.split_first() else { return };
    // Most inputs start after a valid handshake, which is too long to be guessed.
    let head: Vec<u8> = match first % 4 {
        0 => Vec::new(),
        1 => wire::greeting().to_vec(),
        _ => [&wire::greeting()[..], &wire::ready(SocketKind::Sub)].concat(),
    };
    let bytes = [&head[..], rest].concat();
    let whole = decode(&bytes, usize::MAX);
    for cut in [1, 3, 64] {
        assert_eq!(decode(&bytes, cut), whole, "cuts of {cut}");
    }
    let mut again = [&wire::greeting()[..], &wire::ready(SocketKind::Sub)].concat();
    let mut messages = Vec::new();
    for event in whole.0 {
        let _change = wire::subscription_change(&event);
        if let Event::Message(parts) = &event {
            again.extend_from_slice(&wire::message(parts));
            messages.push(event);
        }
    }
    let (events, error) = decode(&again, 7);
    assert!(error.is_none() && events[2..] == messages[..], "{error:?}");
});
