//! Requests from arbitrary bytes: the same commands however the bytes are split, within the limits, and
//! little memory for lengths that are only declared.

#![no_main]

use bytes::BytesMut;
use kvstore_resp::wire::{Command, Limits, READ_BYTES, ReadLimit, RequestParser, WireError};

const LIMITS: Limits = Limits { value_bytes_max: 1 << 20, command_bytes_max: 2 << 20, arguments_max: 64 };

fn parse(bytes: &[u8], cut: usize) -> (Vec<Command>, Option<WireError>) {
    let (mut parser, mut buffer) = (RequestParser::new(LIMITS), BytesMut::new());
    let (mut commands, mut rest) = (Vec::new(), bytes);
    loop {
        loop {
            match parser.next(&mut buffer) {
                Ok(Some(command)) => {
                    let sum: usize = command.arguments.iter().map(|argument| argument.len()).sum();
                    assert!(!command.arguments.is_empty() && command.arguments.len() <= LIMITS.arguments_max);
                    assert!(sum == command.bytes && sum <= LIMITS.command_bytes_max);
                    commands.push(command);
                }
                Ok(None) => break,
                Err(error) => return (commands, Some(error)),
            }
        }
        if rest.is_empty() {
            return (commands, None);
        }
        let most = match parser.room(buffer.len()) {
            ReadLimit::Any => usize::MAX,
            ReadLimit::AtMost(room) => {
                assert!(room > 0 && room <= bytes.len().max(READ_BYTES) + 2, "{room}");
                room
            }
        };
        let (now, later) = rest.split_at(cut.min(most).min(rest.len()));
        buffer.extend_from_slice(now);
        rest = later;
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let whole = parse(input, usize::MAX);
    for cut in [1, 3, 64] {
        assert_eq!(parse(input, cut), whole, "cuts of {cut}");
    }
});
