//! Lost, repeated and reordered messages; publishers and gateways that restart. In the end the index always equals the
//! engine's true set of blocks.
//!
//! A model engine computes prompts into a small pool, evicts, clears, and publishes; a seeded network damages
//! the feed; the follower sees only what arrives, and a replay buffer of limited length.

use std::collections::{BTreeMap, VecDeque};

use kvstore_block::{block_hash, chained_hash};
use router_events::follower::{Follower, Step};
use router_events::snapshot;
use router_events::tracker::Tracker;
use router_events::wire::{EventBatch, KvEvent, Removed, Stored, encode};
use router_radix::{Index, IndexConfig, Member, Tier};

const BLOCK_TOKENS: usize = 4;
const POOL: usize = 60;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((word ^ (word >> 31)) >> 16) as usize % bound
    }
}

/// A prompt: `number` chooses its blocks; neighbours share beginnings.
fn prompt(number: usize) -> Vec<[u32; BLOCK_TOKENS]> {
    (0..3 + number % 9)
        .map(|at| [if at < 3 { number as u32 / 8 } else { number as u32 }, at as u32, 7, 9])
        .collect()
}

/// An engine: the blocks that it holds, by its own hashes.
struct Engine {
    life: u64,
    sequence: u64,
    clock: f64,
    /// Name → (parent, tokens, last use).
    held: BTreeMap<u64, (Option<u64>, [u32; BLOCK_TOKENS], u64)>,
    sent: VecDeque<(u64, Vec<u8>)>,
    replay_len: usize,
    turn: u64,
}

impl Engine {
    fn new(life: u64, replay_len: usize) -> Self {
        let sent = VecDeque::new();
        Self { life, sequence: 0, clock: life as f64 * 1e6, held: BTreeMap::new(), sent, replay_len, turn: 0 }
    }

    fn name(&self, parent: Option<u64>, tokens: &[u32]) -> u64 {
        chained_hash(Some(parent.unwrap_or(self.life)), block_hash(tokens))
    }

    fn publish(&mut self, events: Vec<KvEvent>) -> (u64, Vec<u8>) {
        self.clock += 1.0;
        let payload = encode(&EventBatch { timestamp: self.clock, events, ..EventBatch::default() });
        let message = (self.sequence, payload);
        self.sequence += 1;
        self.sent.push_back(message.clone());
        if self.sent.len() > self.replay_len {
            self.sent.pop_front();
        }
        message
    }

    fn step(&mut self, random: &mut Random) -> (u64, Vec<u8>) {
        self.turn += 1;
        if random.below(300) == 0 {
            self.held.clear();
            return self.publish(vec![KvEvent::Cleared]);
        }
        let mut events = Vec::new();
        let mut parent = None;
        for tokens in prompt(random.below(200)) {
            let name = self.name(parent, &tokens);
            if !self.held.contains_key(&name) {
                events.push(KvEvent::Stored(Stored {
                    hashes: vec![name],
                    parent,
                    tokens: tokens.to_vec(),
                    block_tokens: BLOCK_TOKENS,
                    ..Stored::default()
                }));
            }
            self.held.insert(name, (parent, tokens, self.turn));
            parent = Some(name);
        }
        while self.held.len() > POOL {
            // Evicts the least recently used block without children.
            let is_leaf = |name: &u64| !self.held.values().any(|held| held.0 == Some(*name));
            let leaf = self.held.iter().filter(|(name, _)| is_leaf(name)).min_by_key(|(_, held)| held.2);
            let Some((&name, _)) = leaf else { break };
            self.held.remove(&name);
            events.push(KvEvent::Removed(Removed { hashes: vec![name], tier: Tier::Device, group: None }));
        }
        self.publish(events)
    }
}

/// A gateway: an index and one follower.
struct Gateway {
    index: Index,
    member: Member,
    follower: Follower,
}

impl Gateway {
    fn new() -> Self {
        let index = Index::new(IndexConfig::default());
        let member = index.write().join().expect("room");
        let follower = Follower::new(Tracker::new(member, BLOCK_TOKENS));
        Self { index, member, follower }
    }

    fn replay(&mut self, engine: &Engine, from: u64) {
        let mut is_empty = true;
        for (sequence, payload) in engine.sent.iter().filter(|message| message.0 >= from) {
            is_empty = false;
            let step = self.follower.replayed(&mut self.index.write(), *sequence, payload);
            if let Step::Replay { from } = step {
                return self.replay(engine, from);
            }
        }
        if is_empty {
            let step = self.follower.replayed_nothing(&mut self.index.write());
            if let Step::Replay { from } = step {
                self.replay(engine, from);
            }
        }
    }

    fn receive(&mut self, engine: &Engine, (sequence, payload): &(u64, Vec<u8>)) {
        let step = self.follower.live(&mut self.index.write(), *sequence, payload);
        if let Step::Replay { from } = step {
            self.replay(engine, from);
            self.follower.after_replay(&mut self.index.write(), *sequence, payload);
        }
    }

    /// Restarts from a snapshot.
    fn restarted(&self) -> Self {
        let state = snapshot::capture("engine", 1, &self.follower, &self.index.write());
        let bytes = snapshot::encode(&[state]);
        let states = snapshot::decode(&bytes).expect("a snapshot");
        let mut fresh = Self::new();
        assert!(snapshot::restore(&states[0], &mut fresh.follower, &mut fresh.index.write()));
        fresh
    }

    fn names(&self) -> Vec<u64> {
        let mut names: Vec<u64> = self.index.write().held(self.member).iter().map(|held| held.key).collect();
        names.sort_unstable();
        names
    }

    /// Leading blocks of each prompt.
    fn overlaps(&self) -> Vec<u32> {
        let mut reader = self.index.reader().expect("a reader");
        let hashes =
            |number: usize| prompt(number).iter().map(|tokens| block_hash(tokens)).collect::<Vec<u64>>();
        (0..200).map(|number| reader.overlaps(&hashes(number)).device(self.member)).collect()
    }
}

fn true_overlaps(engine: &Engine) -> Vec<u32> {
    let held = |number: usize| {
        let mut parent = None;
        let is_held = |tokens: &[u32; BLOCK_TOKENS]| {
            let name = engine.name(parent, tokens);
            parent = Some(name);
            engine.held.contains_key(&name)
        };
        prompt(number).iter().map(is_held).take_while(|is_held| *is_held).count() as u32
    };
    (0..200).map(held).collect()
}

#[derive(Clone, Copy)]
struct Trouble {
    lost: usize,
    repeated: usize,
    swapped: usize,
    engine_restarts: usize,
    gateway_restarts: usize,
}

fn run(seed: u64, trouble: Trouble, replay_len: usize) {
    let mut random = Random(seed);
    let (mut engine, mut gateway) = (Engine::new(1, replay_len), Gateway::new());
    let mut held_back: Option<(u64, Vec<u8>)> = None;
    let one_in = |random: &mut Random, chance: usize| chance > 0 && random.below(chance) == 0;
    for _ in 0..3000 {
        if one_in(&mut random, trouble.engine_restarts) {
            engine = Engine::new(engine.life + 1, replay_len);
            held_back = None;
            // The first messages may be published before there is a subscriber.
            for _ in 0..random.below(8) {
                engine.step(&mut random);
            }
        }
        if one_in(&mut random, trouble.gateway_restarts) {
            gateway = gateway.restarted();
            let from = gateway.follower.replay_from();
            gateway.replay(&engine, from);
        }
        let message = engine.step(&mut random);
        if one_in(&mut random, trouble.lost) {
            continue;
        }
        if one_in(&mut random, trouble.swapped) && held_back.is_none() {
            held_back = Some(message);
            continue;
        }
        gateway.receive(&engine, &message);
        if one_in(&mut random, trouble.repeated) {
            gateway.receive(&engine, &message);
        }
        if let Some(late) = held_back.take() {
            gateway.receive(&engine, &late);
        }
    }
    // The last messages arrive.
    for _ in 0..3 {
        let message = engine.step(&mut random);
        gateway.receive(&engine, &message);
    }
    let names: Vec<u64> = engine.held.keys().copied().collect();
    assert_eq!(gateway.names(), names, "seed {seed}: the engine's true set");
    assert_eq!(gateway.overlaps(), true_overlaps(&engine), "seed {seed}");
}

const NONE: Trouble = Trouble { lost: 0, repeated: 0, swapped: 0, engine_restarts: 0, gateway_restarts: 0 };

#[test]
fn lost_repeated_and_swapped_messages() {
    for seed in 0..6 {
        run(seed, Trouble { lost: 20, ..NONE }, 10_000);
        run(seed, Trouble { repeated: 10, ..NONE }, 10_000);
        run(seed, Trouble { swapped: 10, ..NONE }, 10_000);
    }
}

#[test]
fn publishers_and_gateways_that_start_again() {
    for seed in 10..16 {
        run(seed, Trouble { engine_restarts: 200, ..NONE }, 10_000);
        run(seed, Trouble { gateway_restarts: 100, ..NONE }, 10_000);
        run(
            seed,
            Trouble { lost: 30, repeated: 20, swapped: 20, engine_restarts: 300, gateway_restarts: 200 },
            10_000,
        );
    }
}

/// A publisher may restart and pass the last known number while the gateway is not connected: the blocks of its old run
/// must not stay.
#[test]
fn a_restart_that_has_passed_what_was_known() {
    for seed in 40..60 {
        let mut random = Random(seed);
        let (mut engine, mut gateway) = (Engine::new(1, 10_000), Gateway::new());
        for _ in 0..1 + random.below(20) {
            let message = engine.step(&mut random);
            gateway.receive(&engine, &message);
        }
        let mut restored = gateway.restarted();
        engine = Engine::new(2, 10_000);
        for _ in 0..30 {
            engine.step(&mut random);
        }
        for gateway in [&mut gateway, &mut restored] {
            // Detected on a new connection, or with the next live message.
            if seed % 2 == 0 {
                let from = gateway.follower.replay_from();
                gateway.replay(&engine, from);
            }
            for _ in 0..3 {
                let message = engine.step(&mut random);
                gateway.receive(&engine, &message);
            }
            assert_eq!(gateway.overlaps(), true_overlaps(&engine), "seed {seed}");
        }
    }
}

/// A publisher may restart while the gateway is not connected, and send fewer messages than before: a new connection must
/// detect it, since the next message may be long in coming.
#[test]
fn a_restart_that_has_not_reached_what_was_known() {
    for (seed, said) in (60..80).zip([0, 1, 3].into_iter().cycle()) {
        let mut random = Random(seed);
        let (mut engine, mut gateway) = (Engine::new(1, 10_000), Gateway::new());
        for turn in 0.. {
            let message = engine.step(&mut random);
            gateway.receive(&engine, &message);
            if turn >= 10 && !gateway.names().is_empty() {
                break;
            }
        }
        engine = Engine::new(2, 10_000);
        for _ in 0..said {
            engine.step(&mut random);
        }
        let from = gateway.follower.replay_from();
        gateway.replay(&engine, from);
        assert_eq!(
            gateway.names(),
            engine.held.keys().copied().collect::<Vec<_>>(),
            "seed {seed}: {said} messages"
        );
    }
}

/// With a replay buffer that has lost the missing messages, the index starts over: it may hold fewer blocks than the
/// engine, never more; and when the engine clears, or has replaced its blocks, both are equal again.
#[test]
fn a_replay_that_cannot_help_never_leaves_a_lie() {
    for seed in 20..26 {
        let mut random = Random(seed);
        let (mut engine, mut gateway) = (Engine::new(1, 2), Gateway::new());
        let mut behind = 0;
        for turn in 0..2000 {
            let message = engine.step(&mut random);
            // Long outages: more than the buffer holds.
            if turn % 100 < 10 {
                continue;
            }
            gateway.receive(&engine, &message);
            let (known, truth) = (gateway.overlaps(), true_overlaps(&engine));
            assert!(
                known.iter().zip(&truth).all(|(known, truth)| known <= truth),
                "seed {seed}, turn {turn}"
            );
            behind += usize::from(known != truth);
        }
        assert!(behind > 0, "the test must see the loss");
        engine.held.clear();
        let cleared = engine.publish(vec![KvEvent::Cleared]);
        gateway.receive(&engine, &cleared);
        for _ in 0..50 {
            let message = engine.step(&mut random);
            gateway.receive(&engine, &message);
        }
        assert_eq!(gateway.overlaps(), true_overlaps(&engine), "seed {seed}");
    }
}
