//! Requests whole, cut anywhere, too large and malformed.

use super::*;

const LIMITS: Limits = Limits { value_bytes_max: 1 << 20, command_bytes_max: 3 << 20, arguments_max: 64 };

fn request(arguments: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments {
        bytes.extend(format!("${}\r\n", argument.len()).bytes());
        bytes.extend_from_slice(argument);
        bytes.extend(b"\r\n");
    }
    bytes
}

fn texts(command: &Command) -> Vec<Vec<u8>> {
    command.arguments.iter().map(|value| value.clone().into_pieces().concat()).collect()
}

/// Feeds bytes in the given cuts, as a connection does. Returns the commands, and the error if there was one.
fn parse(bytes: &[u8], mut cut: impl FnMut() -> usize) -> (Vec<Vec<Vec<u8>>>, Option<WireError>) {
    let (mut parser, mut buffer, mut commands) = (RequestParser::new(LIMITS), BytesMut::new(), Vec::new());
    let mut rest = bytes;
    loop {
        loop {
            match parser.next(&mut buffer) {
                Ok(Some(command)) => commands.push(texts(&command)),
                Ok(None) => break,
                Err(error) => return (commands, Some(error)),
            }
        }
        if rest.is_empty() {
            return (commands, None);
        }
        let most = match parser.room(buffer.len()) {
            ReadLimit::Any => usize::MAX,
            ReadLimit::AtMost(room) => room,
        };
        assert!(most > 0, "a parser that wants more must make room");
        let (now, later) = rest.split_at(cut().clamp(1, most).min(rest.len()));
        buffer.extend_from_slice(now);
        rest = later;
    }
}

#[test]
fn cuts_do_not_matter() {
    let long: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
    let mut bytes = request(&[b"SET", b"key\r\n\0", &long]);
    bytes.extend(request(&[b"GET", b""]));
    bytes.extend(b"\r\n*0\r\n*-1\r\nping  \"a b\\x41\\n\" 'it\\'s' \r\n");
    bytes.extend(request(&[b"MSET", b"a", &long[..SHORT_MAX], b"b", &long[..SHORT_MAX + 1]]));
    let expected = vec![
        vec![b"SET".to_vec(), b"key\r\n\0".to_vec(), long.clone()],
        vec![b"GET".to_vec(), Vec::new()],
        vec![b"ping".to_vec(), b"a bA\n".to_vec(), b"it's".to_vec()],
        vec![
            b"MSET".to_vec(),
            b"a".to_vec(),
            long[..SHORT_MAX].to_vec(),
            b"b".to_vec(),
            long[..SHORT_MAX + 1].to_vec(),
        ],
    ];
    for size in [1, 2, 3, 7, 1000, 65_536, usize::MAX] {
        let (commands, error) = parse(&bytes, || size);
        assert_eq!(error, None, "cuts of {size}");
        assert!(commands == expected, "cuts of {size}");
    }
    let seed = 0x5EED_u64;
    println!("seed {seed:#x}");
    let mut state = seed;
    for _ in 0..50 {
        let (commands, error) = parse(&bytes, || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            1 << (state >> 60)
        });
        assert!(error.is_none() && commands == expected, "seed {seed:#x}");
    }
}

#[test]
fn a_declared_length_alone_reserves_little() {
    let mut parser = RequestParser::new(LIMITS);
    let mut buffer = BytesMut::from(&b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1048576\r\n"[..]);
    assert!(parser.next(&mut buffer).expect("valid so far").is_none());
    let (mut received, mut reserved_most) = (0, 0);
    while received < 1 << 20 {
        let ReadLimit::AtMost(room) = parser.room(buffer.len()) else { panic!("inside a long argument") };
        let with_end = usize::from(received + room > 1 << 20) * 2;
        assert!(room - with_end <= received.max(READ_BYTES), "{room} after {received}");
        reserved_most = reserved_most.max(room);
        let bytes = vec![7; room - with_end];
        buffer.extend_from_slice(&bytes);
        received += bytes.len();
        assert!(parser.next(&mut buffer).expect("valid").is_none());
    }
    assert!(reserved_most > READ_BYTES, "it grows");
    buffer.extend_from_slice(b"\r\n");
    let command = parser.next(&mut buffer).expect("valid").expect("complete");
    assert_eq!((command.arguments[2].len(), command.long_bytes), (1 << 20, 1 << 20));
    assert!(command.arguments[2].pieces().count() < 12);
}

#[test]
fn malformed_requests_are_errors() {
    let too_long = vec![b'x'; LINE_MAX];
    let cases: &[(&[u8], WireError)] = &[
        (b"*x\r\n", WireError::ArgumentCount),
        (b"*65\r\n", WireError::ArgumentCount),
        (b"*9223372036854775808\r\n", WireError::ArgumentCount),
        (b"*1\n", WireError::ArgumentCount),
        (b"*1\r\n:1\r\n", WireError::ExpectedBulk(b':')),
        (b"*1\r\n$-1\r\n", WireError::ArgumentLength),
        (b"*1\r\n$1048577\r\n", WireError::ArgumentLength),
        (b"*1\r\n$1x\r\n", WireError::ArgumentLength),
        (b"*1\r\n$1\r\nabc", WireError::ExpectedEnd),
        (b"*1\r\n$000000000000000000000000000000001\r\n", WireError::NumberLine),
        (b"ping \"a\r\n", WireError::Quotes),
        (b"ping 'a'b\r\n", WireError::Quotes),
        (&too_long, WireError::Inline),
    ];
    for (bytes, error) in cases {
        assert_eq!(parse(bytes, || 5).1, Some(*error), "{}", bytes[..bytes.len().min(60)].escape_ascii());
    }
}

#[test]
fn the_sum_of_arguments_is_bounded() {
    let half = vec![0; 1 << 20];
    let (commands, error) = parse(&request(&[b"MSET", b"a", &half, b"b", &half, b"c", &half]), || 65_536);
    assert_eq!((commands.len(), error), (0, Some(WireError::ArgumentLength)));
}

#[test]
fn numbers() {
    let cases: &[(&[u8], Option<i64>)] = &[
        (b"0", Some(0)),
        (b"-12", Some(-12)),
        (b"9223372036854775807", Some(i64::MAX)),
        (b"-9223372036854775808", Some(i64::MIN)),
        (b"9223372036854775808", None),
        (b"", None),
        (b"-", None),
        (b"+1", None),
        (b"1 ", None),
    ];
    for (digits, expected) in cases {
        assert_eq!(number(digits), *expected, "{}", digits.escape_ascii());
    }
}

#[test]
fn an_abandoned_command_is_skipped_and_the_next_one_is_parsed() {
    let long = vec![b'v'; 300_000];
    let mut bytes = b"*4\r\n$4\r\nMSET\r\n$1\r\na\r\n$300000\r\n".to_vec();
    bytes.extend(&long);
    bytes.extend(b"\r\n$1\r\nb\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n");
    for cut in [1, 1000, 100_000] {
        let limits = Limits { value_bytes_max: 1 << 20, command_bytes_max: 1 << 20, arguments_max: 16 };
        let (mut parser, mut buffer) = (RequestParser::new(limits), BytesMut::new());
        buffer.extend_from_slice(&bytes[..200_000]);
        assert_eq!(parser.next(&mut buffer), Ok(None));
        assert!((200_000..=300_000).contains(&parser.charged_bytes()), "{}", parser.charged_bytes());
        parser.abandon();
        assert_eq!(parser.charged_bytes(), 0);
        let mut commands = Vec::new();
        for part in bytes[200_000..].chunks(cut) {
            buffer.extend_from_slice(part);
            while let Some(command) = parser.next(&mut buffer).expect("valid") {
                commands.push(command);
            }
            assert!(buffer.len() < 100, "nothing of it is kept");
        }
        let lengths: Vec<Vec<usize>> =
            commands.iter().map(|command| command.arguments.iter().map(Value::len).collect()).collect();
        assert_eq!(lengths, [vec![0], vec![3, 1]]);
    }
}

#[test]
fn short_arguments_are_charged_when_there_are_many_of_them() {
    let limits = Limits { value_bytes_max: 1 << 20, command_bytes_max: 16 << 20, arguments_max: 65_536 };
    // Ten bytes of a small command cost nothing.
    let (mut parser, mut buffer) = (RequestParser::new(limits), BytesMut::from(&b"*3\r\n$3\r\nSET\r\n"[..]));
    assert_eq!((parser.next(&mut buffer), parser.charged_bytes()), (Ok(None), 0));
    // Empty arguments cost their bookkeeping, others their bytes as well.
    for (length, least) in [(0, 60_000 * 32), (100, 60_000 * 100)] {
        let (mut parser, mut buffer) = (RequestParser::new(limits), BytesMut::new());
        buffer.extend_from_slice(b"*65536\r\n");
        let argument = [format!("${length}\r\n").as_bytes(), &vec![b'x'; length], b"\r\n"].concat();
        for _ in 0..60_000 {
            buffer.extend_from_slice(&argument);
            assert_eq!(parser.next(&mut buffer), Ok(None));
        }
        let charged = parser.charged_bytes();
        assert!(charged >= least && charged < 2 * (least + 60_000 * 64), "{charged} for {length}");
        parser.abandon();
        assert_eq!(parser.charged_bytes(), 0);
        for _ in 60_000..65_536 {
            buffer.extend_from_slice(&argument);
        }
        let command = parser.next(&mut buffer).expect("valid").expect("complete");
        assert_eq!(command.arguments.len(), 1, "nothing of an abandoned command is kept");
        buffer.extend_from_slice(b"*1\r\n$4\r\nPING\r\n");
        assert!(parser.next(&mut buffer).expect("valid").is_some());
        assert_eq!(parser.charged_bytes(), 0, "the next command begins anew");
    }
}
