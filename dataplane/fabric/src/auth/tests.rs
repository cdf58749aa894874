//! Tests of the proofs that two peers exchange.

use super::*;

fn sides() -> (Authentication, Authentication) {
    sides_at(DialledAddress::LOCAL, DialledAddress::LOCAL)
}

const TCP: Protocol = Protocol { transport: Transport::Tcp, versions: Versions { oldest: 2, newest: 4 } };

fn sides_at(from: DialledAddress, at: DialledAddress) -> (Authentication, Authentication) {
    let (mut initiator, bytes) = Authentication::connecting(TCP).expect("random bytes");
    let mut acceptor = Authentication::accepting(TCP);
    let answer = acceptor.opened(&bytes, at).expect("an opening").expect("an answer");
    assert_eq!(initiator.opened(&answer, from), Ok(None));
    (initiator, acceptor)
}

fn key(secret: &str) -> SharedKey {
    SharedKey::from_secret(secret.repeat(32).as_bytes()).expect("long enough")
}

/// Keyed BLAKE3 over the index, under a key that is derived from the seed: computed from these definitions.
#[test]
fn numbers_of_a_sequence_are_those_of_their_seed_and_index() {
    let key = blake3::derive_key("kvasir 2026-11-27 names of sessions", &7_u64.to_le_bytes());
    let third = blake3::keyed_hash(&key, &3_u64.to_le_bytes());
    let third = u64::from_le_bytes(third.as_bytes()[..8].try_into().expect("eight bytes"));
    assert_eq!(keyed_sequence(7, 3), third);
    let numbers: std::collections::HashSet<u64> =
        (0..100).flat_map(|index| [keyed_sequence(7, index), keyed_sequence(8, index)]).collect();
    assert_eq!(numbers.len(), 200);
}

#[test]
fn both_sides_prove_the_same_secret_and_no_other() {
    let (initiator, acceptor) = sides();
    let keys = [key("a"), key("b"), SharedKey::default()];
    for ours in &keys {
        for theirs in &keys {
            let expected = if ours == theirs { Ok(()) } else { Err(AuthError::Secret) };
            let proof = initiator.prove(theirs, b"hello").expect("agreed");
            assert_eq!(acceptor.check(ours, b"hello", &proof), expected);
            let proof = acceptor.prove(theirs, b"hello").expect("agreed");
            assert_eq!(initiator.check(ours, b"hello", &proof), expected);
        }
    }
}

#[test]
fn a_proof_is_of_no_use_for_anything_else() {
    let key = key("a");
    let (initiator, acceptor) = sides();
    let proof = initiator.prove(&key, b"hello").expect("agreed");
    assert_eq!(acceptor.check(&key, b"hellp", &proof), Err(AuthError::Secret), "a changed hello");
    assert_eq!(initiator.check(&key, b"hello", &proof), Err(AuthError::Secret), "sent back");
    assert_eq!(sides().1.check(&key, b"hello", &proof), Err(AuthError::Secret), "sent again");
}

#[test]
fn a_hello_that_is_passed_on_proves_nothing() {
    let address = |text: &str| DialledAddress::of(text.parse().expect("an address"));
    let (one, mapped) = (address("10.0.0.1:7"), address("[::ffff:10.0.0.1]:7"));
    for (dialled, at, is_good) in [
        (one, mapped, true),
        (one, address("10.0.0.2:7"), false),
        (one, address("10.0.0.1:8"), false),
        (one, address("[::1]:7"), false),
    ] {
        let (initiator, acceptor) = sides_at(dialled, at);
        let proof = initiator.prove(&key("a"), b"hello").expect("agreed");
        assert_eq!(acceptor.check(&key("a"), b"hello", &proof).is_ok(), is_good, "{dialled:?} {at:?}");
        let proof = initiator.prove(&SharedKey::default(), b"hello").expect("agreed");
        assert_eq!(acceptor.check(&SharedKey::default(), b"hello", &proof), Ok(()));
    }
}

#[test]
fn other_openings_are_refused() {
    let (connecting, good) = Authentication::connecting(TCP).expect("random bytes");
    assert_eq!(connecting.prove(&key("a"), b"hello"), Err(AuthError::Order));
    assert_eq!(sides().0.opened(&good, DialledAddress::LOCAL), Err(AuthError::Order), "a second opening");
    for (at, value, error) in [
        (0, b'X', AuthError::Stranger),
        (8, 1, AuthError::Format),
        (9, Transport::Rdma as u8, AuthError::Transport),
        (14, 1, AuthError::Format),
        (15, 1, AuthError::Format),
    ] {
        let mut bad = good;
        bad[at] = value;
        let refused = Authentication::accepting(TCP).opened(&bad, DialledAddress::LOCAL);
        assert_eq!(refused, Err(error), "byte {at}");
    }
}

#[test]
fn whatever_comes_as_an_opening_is_taken_or_refused() {
    let (_, good) = Authentication::connecting(Transport::Tcp.into()).expect("random bytes");
    let mut random = fastrand::Rng::with_seed(7);
    let mut draw = |bound: usize| random.usize(..bound);
    for round in 0..20_000 {
        let mut bytes = [&good[..], &[5; PROOF_BYTES], b"hello"].concat();
        bytes.truncate(if round % 3 == 0 { draw(bytes.len() + 1) } else { bytes.len() });
        for _ in 0..draw(4) {
            if let Some(byte) = bytes.get_mut(draw(20)) {
                *byte = draw(256) as u8;
            }
        }
        fuzz(&bytes);
    }
}

fn speaking(oldest: u16, newest: u16) -> Protocol {
    Protocol { versions: Versions { oldest, newest }, ..TCP }
}

#[test]
fn processes_of_two_releases_speak_the_newest_version_that_both_know() {
    let key = key("a");
    for (ours, theirs, common) in [
        ((2, 4), (2, 4), Some(4)),
        ((2, 4), (4, 9), Some(4)),
        ((2, 4), (1, 2), Some(2)),
        ((2, 4), (3, 3), Some(3)),
        ((2, 4), (5, 9), None),
        ((2, 4), (0, 1), None),
        // A range that is none.
        ((2, 4), (4, 2), None),
    ] {
        for (from, at) in [(ours, theirs), (theirs, ours)] {
            let (from, at) = (speaking(from.0, from.1), speaking(at.0, at.1));
            let (mut initiator, bytes) = Authentication::connecting(from).expect("random bytes");
            let mut acceptor = Authentication::accepting(at);
            let answer =
                acceptor.opened(&bytes, DialledAddress::LOCAL).expect("an opening").expect("an answer");
            let opened = initiator.opened(&answer, DialledAddress::LOCAL);
            assert_eq!((initiator.version(), acceptor.version()), (common, common), "{from:?} {at:?}");
            let refused = |theirs: Protocol, ours: Protocol| AuthError::Version {
                theirs: theirs.versions,
                ours: ours.versions,
            };
            if common.is_none() {
                assert_eq!(opened, Err(refused(at, from)));
                // An initiator that goes on all the same is refused with its hello.
                assert_eq!(acceptor.check(&key, b"hello", &[0; PROOF_BYTES]), Err(refused(from, at)));
            } else {
                assert_eq!(opened, Ok(None));
                let proof = initiator.prove(&key, b"hello").expect("agreed");
                assert_eq!(acceptor.check(&key, b"hello", &proof), Ok(()));
            }
        }
    }
    let text =
        AuthError::Version { theirs: speaking(3, 3).versions, ours: speaking(1, 2).versions }.to_string();
    assert_eq!(text, "the peer speaks version 3 of the protocol, and this process versions 1 to 2");
}

/// A man in the middle who takes away the newer versions is noticed.
#[test]
fn openings_cannot_be_changed_on_their_way() {
    let key = key("a");
    for at in 10..OPENING_BYTES {
        let (mut initiator, mut bytes) = Authentication::connecting(speaking(1, 4)).expect("random bytes");
        // Of the versions the low byte, so that there is a common one.
        bytes[at] = if at == NEWEST_AT { 2 } else { bytes[at] ^ 1 };
        let mut acceptor = Authentication::accepting(speaking(0, 4));
        let Ok(Some(answer)) = acceptor.opened(&bytes, DialledAddress::LOCAL) else {
            assert!((14..16).contains(&at), "byte {at}");
            continue;
        };
        initiator.opened(&answer, DialledAddress::LOCAL).expect("a common version");
        let proof = initiator.prove(&key, b"hello").expect("agreed");
        let refused = acceptor.check(&key, b"hello", &proof);
        assert!(
            matches!(refused, Err(AuthError::Secret | AuthError::Version { .. })),
            "byte {at}: {refused:?}"
        );
        let proof = acceptor.prove(&key, b"hello").expect("agreed");
        assert_eq!(initiator.check(&key, b"hello", &proof), Err(AuthError::Secret), "byte {at}");
    }
}

#[test]
fn secrets_are_long_and_are_not_shown() {
    let short = [b'a'; SECRET_BYTES_MIN - 1];
    assert_eq!(SharedKey::from_secret(&short), Err(ShortSecret(31)));
    assert_eq!(SharedKey::from_secret(b" \n"), Err(ShortSecret(0)));
    let padded = format!("  {}\n", "a".repeat(32));
    assert_eq!(SharedKey::from_secret(padded.as_bytes()), Ok(key("a")));
    assert_eq!(format!("{:?} {:?}", key("a"), SharedKey::default()), "SharedKey(..) SharedKey(none)");
}
