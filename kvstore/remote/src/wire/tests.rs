//! Messages that survive encoding and decoding, and bytes that are not a message.

use super::*;

fn samples() -> Vec<Message> {
    let identity = BlockIdentity([7; 16]);
    let description = Description { parent: identity, bytes: 1, checksum: u64::MAX, meta: 3 };
    let grant = |slot| Grant::Slot { slot, generation: 9 };
    vec![
        Message::LookUp { request: 1, chain: vec![identity; BLOCKS_PER_MESSAGE_MAX] },
        Message::Release { lease: 2 },
        Message::Reserve { request: 3, offers: vec![Offer { identity, description }; 64] },
        Message::Commit { request: 4, written: u64::MAX },
        Message::ReportDamaged { chain: vec![identity] },
        Message::Retain { seconds: 3600, chain: vec![identity; 2] },
        Message::Stats { request: 5 },
        Message::Found {
            request: 6,
            lease: 7,
            lease_ms: 8,
            blocks: vec![FoundBlock { slot: 1, generation: 2, description }; 64],
        },
        Message::Granted {
            request: 9,
            lease_ms: 10,
            grants: vec![grant(1), Grant::Present, Grant::Pending, Grant::Full, Grant::Refused],
        },
        Message::Committed { request: 11, registered: 12, damaged: 13 },
        Message::Load { request: 14, slots: 15, free: 16, blocks: 17, leases: 18, verifying: 19 },
        Message::Busy { request: 20 },
    ]
}

#[test]
fn messages_come_back_as_they_went_and_fit() {
    for message in samples() {
        let bytes = message.encode();
        assert!(bytes.len() <= 8 << 10, "{} bytes", bytes.len());
        assert_eq!(Message::decode(&bytes), Some(message));
    }
}

#[test]
fn every_flipped_bit_of_a_message_is_noticed() {
    for message in samples() {
        let bytes = message.encode();
        for bit in 0..bytes.len() * 8 {
            let mut wrong = bytes.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Message::decode(&wrong), None, "bit {bit} of {message:?}");
        }
    }
}

#[test]
fn mutated_bodies_never_panic_and_encode_to_what_they_were() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut draw = |bound: usize| random.usize(..bound);
    let samples = samples();
    let mut understood = 0;
    for round in 0..30_000 {
        let mut body = Vec::new();
        samples[round % samples.len()].encode_body(&mut body);
        if draw(3) == 0 {
            body.truncate(draw(body.len() + 1));
        }
        for _ in 0..draw(4).min(body.len()) {
            let at = draw(body.len().min(40));
            body[at] = draw(256) as u8;
        }
        understood += usize::from(Message::decode_body(&body).is_some());
        fuzz(&body);
    }
    assert!(understood > 5_000, "the mutations are too rough: {understood}");
}
