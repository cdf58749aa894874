//! One fault at a time, over the simulated fabric.

mod rig;

use std::sync::Arc;
use std::time::Duration;

use dataplane_fabric::sim::Faults;
use kvstore_block::BlockIdentity;
use kvstore_remote::{Outcome, Refusal, RemoteConfig, StoreResult};
use rig::{Cluster, GROUP_BLOCKS, block, chain, config, counted, is_right};

fn cluster(servers: usize, clients: usize, server_slots: u32) -> Cluster {
    let mut cluster = Cluster::new(7, Faults::default(), (servers, clients), server_slots, config(7));
    cluster.until_connected();
    cluster
}

/// Returns a chain of one group that is placed on this server.
fn chain_at(cluster: &Cluster, server: usize, blocks: usize) -> Vec<BlockIdentity> {
    let chains = (0..).map(|number| chain(number, blocks));
    chains.into_iter().find(|chain| cluster.home(&chain[0]) == server).expect("some chain")
}

#[test]
fn a_chain_over_many_groups_and_nodes_comes_in_one_round_trip() {
    let mut cluster = cluster(5, 2, 256);
    let chain = chain(1, 100);
    cluster.store(0, &chain);
    let homes: std::collections::BTreeSet<usize> =
        chain.iter().step_by(GROUP_BLOCKS).map(|group| cluster.home(group)).collect();
    assert!(homes.len() >= 4, "the groups lie on {homes:?}");
    let start = cluster.tick;
    assert_eq!(cluster.fetch(1, &chain, 500), 100);
    // A message, its answer and the reads take a tick or two each; the checksums of 100 blocks some more.
    let took = cluster.tick - start;
    assert!(took <= 6 + 100 * rig::SLOT_BYTES as u64 / (64 << 10), "{took} ticks");
    assert_eq!(cluster.fetch(1, &chain[..37], 500), 37, "a part of a chain");
    let mut longer = chain.clone();
    longer.extend(rig::chain(2, 30));
    assert_eq!(cluster.fetch(1, &longer, 500), 100, "it ends where the stored chain ends");
    cluster.assert_no_leak();
}

#[test]
fn the_home_of_each_group_is_asked_to_keep_its_blocks() {
    let mut cluster = cluster(3, 1, 256);
    let (chain, how_long) = (chain(1, 5 * GROUP_BLOCKS + 3), Duration::from_millis(90_500));
    let client = &mut cluster.clients[0].pool;
    assert_eq!(client.retain(&chain, 0, 2, how_long), 2 * GROUP_BLOCKS);
    assert_eq!(client.retain(&chain, 2 * GROUP_BLOCKS, 9, how_long), chain.len());
    cluster.run(10);
    let mut told = 0;
    for at in 0..3 {
        let of_home = |number: &usize| cluster.home(&chain[number - number % GROUP_BLOCKS]) == at;
        let expected: Vec<_> =
            (0..chain.len()).filter(of_home).map(|number| (chain[number], Duration::from_secs(90))).collect();
        let retained = cluster.server(at).retained.lock().expect("no panic").clone();
        assert_eq!(retained, expected, "node {at}");
        told += retained.len();
    }
    assert_eq!(told, chain.len());
}

#[test]
fn a_chain_can_be_fetched_from_its_middle_on() {
    let mut cluster = cluster(3, 1, 256);
    let chain = chain(1, 40);
    cluster.store(0, &chain);
    let (now, deadline) = (cluster.now(), cluster.after(100));
    let client = &mut cluster.clients[0];
    let targets = (0..20).map(|_| client.slots.acquire().expect("slot")).collect();
    let ticket = client.pool.fetch(&chain, 13, targets, deadline, now).expect("room");
    assert_eq!(cluster.fetched(0, &chain[13..], ticket), (20, 0));
    cluster.assert_no_leak();
}

#[test]
fn a_hung_node_costs_its_deadline_and_then_nothing() {
    let mut cluster = cluster(3, 1, 256);
    let (hung, fine) = (chain_at(&cluster, 0, 5), chain_at(&cluster, 1, 5));
    cluster.store(0, &hung);
    cluster.store(0, &fine);
    cluster.server(0).runs = false;
    for _ in 0..3 {
        let (start, slow) = (cluster.tick, cluster.begin_fetch(0, &hung, 15));
        let quick = cluster.begin_fetch(0, &fine, 15);
        assert_eq!(cluster.fetched(0, &fine, quick), (5, 0));
        assert!(cluster.tick - start <= 8, "a hung node holds up another: {}", cluster.tick - start);
        assert_eq!(cluster.fetched(0, &hung, slow), (0, 0));
        assert_eq!(cluster.tick - start, 15, "the deadline is kept");
    }
    cluster.run(25);
    assert_eq!(cluster.clients[0].pool.usable_nodes(), 2, "three timeouts open the breaker");
    let start = cluster.tick;
    assert_eq!(cluster.fetch(0, &hung, 500), 0);
    assert!(cluster.tick - start <= 4, "nobody waits for a node whose breaker is open");
    let nodes = cluster.clients[0].pool.counters().nodes();
    let timeouts = nodes.iter().map(|(_, counters)| counted(&counters.snapshot(), "timeouts"));
    assert!(timeouts.sum::<u64>() >= 3);
    cluster.server(0).runs = true;
    cluster.until_connected();
    assert_eq!(cluster.fetch(0, &hung, 100), 5, "it comes back with what it had");
    cluster.assert_no_leak();
}

#[test]
fn a_dead_node_is_a_miss_at_once_and_its_blocks_find_another_home() {
    let mut cluster = cluster(3, 1, 256);
    let (dead, fine) = (chain_at(&cluster, 0, 5), chain_at(&cluster, 1, 5));
    cluster.store(0, &dead);
    cluster.store(0, &fine);
    let ticket = cluster.begin_fetch(0, &dead, 500);
    let start = cluster.tick;
    cluster.kill(0);
    assert_eq!(cluster.fetched(0, &dead, ticket), (0, 0));
    assert!(cluster.tick - start <= 4, "{} ticks", cluster.tick - start);
    assert_eq!(cluster.fetch(0, &fine, 100), 5);
    cluster.store(0, &dead);
    assert_eq!(cluster.fetch(0, &dead, 100), 5, "stored at the second of the ranking");
    cluster.assert_no_leak();
}

#[test]
fn removing_and_adding_a_node_touches_its_share_only() {
    let mut cluster = cluster(4, 1, 256);
    let chains: Vec<_> = (0..30).map(|number| chain(number, 4)).collect();
    chains.iter().for_each(|chain| cluster.store(0, chain));
    let all = cluster.node_list();
    let now = cluster.now();
    cluster.clients[0].pool.set_nodes(&all[1..], now).expect("three nodes");
    for chain in &chains {
        let expected = if cluster.home(&chain[0]) == 0 { 0 } else { 4 };
        assert_eq!(cluster.fetch(0, chain, 100), expected);
    }
    let now = cluster.now();
    cluster.clients[0].pool.set_nodes(&all, now).expect("four nodes");
    cluster.until_connected();
    assert!(chains.iter().all(|chain| cluster.fetch(0, chain, 100) == 4), "nothing was lost");
    cluster.assert_no_leak();
}

#[test]
fn a_late_reader_is_fenced_before_its_slots_are_reused() {
    let mut cluster = cluster(1, 2, 8);
    let (old, new) = (chain(1, 8), chain(2, 8));
    cluster.store(0, &old);
    let (now, deadline) = (cluster.now(), cluster.after(100));
    let ticket = cluster.clients[0].pool.look_up(&old, 0, deadline, now).expect("room");
    let found = cluster.outcome(0, |outcome| matches!(outcome, Outcome::Found { .. }));
    assert!(matches!(found, Outcome::Found { blocks, .. } if blocks.len() == 8));
    // The reader's clock stands still, and its reads are slow.
    cluster.clients[0].runs = false;
    cluster.run(200);
    cluster.network.set_faults(Faults { delay_ticks_max: 100_000, ..Faults::default() });
    let reader = &mut cluster.clients[0];
    let targets = (0..8).map(|_| reader.slots.acquire().expect("slot")).collect();
    reader.pool.read(ticket, targets, deadline, now).expect("it holds the lease");
    cluster.network.set_faults(Faults::default());
    let store = cluster.begin_store(1, &new, 50);
    assert_eq!(cluster.stored(1, store), [StoreResult::Full; 8], "leased slots are not reused");
    let counters = Arc::clone(cluster.server(0).server.counters());
    assert_eq!(counted(&counters.snapshot(), "fences"), 0);
    cluster.until("the fence", 110, |_| counted(&counters.snapshot(), "fences") == 1);
    cluster.run(2);
    cluster.store(1, &new);
    cluster.clients[0].runs = true;
    assert_eq!(cluster.fetched(0, &old, ticket).0, 0, "its reads ended with the connection");
    cluster.until_connected();
    assert_eq!(cluster.fetch(0, &new, 100), 8, "it may come again");
    cluster.assert_no_leak();
}

#[test]
fn a_reader_gives_its_lease_back_in_time() {
    let mut cluster = cluster(1, 1, 8);
    let chain = chain(1, 8);
    cluster.store(0, &chain);
    let (now, deadline) = (cluster.now(), cluster.after(100));
    let ticket = cluster.clients[0].pool.look_up(&chain, 0, deadline, now).expect("room");
    cluster.run(400);
    let counters = Arc::clone(cluster.server(0).server.counters());
    assert_eq!(counted(&counters.snapshot(), "expired_leases"), 0);
    assert!(cluster.server(0).server.is_idle());
    let (now, deadline) = (cluster.now(), cluster.after(100));
    let client = &mut cluster.clients[0];
    let targets = vec![client.slots.acquire().expect("slot")];
    let refused = client.pool.read(ticket, targets, deadline, now).expect_err("the lease is over");
    assert_eq!((refused.reason, refused.targets.len()), (Refusal::Gone, 1));
    drop(refused);
    cluster.assert_no_leak();
}

#[test]
fn a_look_up_can_be_read_or_cancelled() {
    let mut cluster = cluster(2, 1, 64);
    let chain = chain(1, 20);
    cluster.store(0, &chain);
    for cancelled in [false, true] {
        let (now, deadline) = (cluster.now(), cluster.after(100));
        let ticket = cluster.clients[0].pool.look_up(&chain, 3, deadline, now).expect("room");
        let found = cluster.outcome(0, |outcome| matches!(outcome, Outcome::Found { .. }));
        assert!(matches!(found, Outcome::Found { blocks, .. } if blocks.len() == 17));
        let (now, deadline) = (cluster.now(), cluster.after(100));
        let client = &mut cluster.clients[0];
        if cancelled {
            client.pool.cancel(ticket, now);
        } else {
            let targets = (0..9).map(|_| client.slots.acquire().expect("slot")).collect();
            client.pool.read(ticket, targets, deadline, now).expect("found");
            assert_eq!(cluster.fetched(0, &chain[3..], ticket), (9, 0));
        }
        cluster.assert_no_leak();
    }
}

#[test]
fn a_cancelled_fetch_keeps_the_slots_that_are_being_read() {
    let mut cluster = cluster(1, 1, 64);
    let chain = chain(1, 20);
    cluster.store(0, &chain);
    let ticket = cluster.begin_fetch(0, &chain, 500);
    let counters = Arc::clone(cluster.clients[0].pool.counters());
    cluster.until("reads are in flight", 10, |_| {
        counters.nodes().iter().any(|(_, node)| counted(&node.snapshot(), "transfers") > 0)
    });
    let now = cluster.now();
    cluster.clients[0].pool.cancel(ticket, now);
    let level = counted(&counters.snapshot(), "held_slots");
    let (_, held) = cluster.fetched(0, &chain, ticket);
    assert!(held > 0);
    assert_eq!(level, held as u64);
    match cluster.outcome(0, |outcome| matches!(outcome, Outcome::Returned { .. })) {
        Outcome::Returned { ticket: returned, slots } => {
            assert_eq!((returned, slots.len()), (ticket, held));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(counted(&counters.snapshot(), "held_slots"), 0);
    cluster.assert_no_leak();
}

#[test]
fn reads_that_never_complete_come_back_with_the_connection() {
    let mut cluster = cluster(1, 1, 64);
    let chain = chain(1, 6);
    cluster.store(0, &chain);
    let ticket = cluster.begin_fetch(0, &chain, 30);
    cluster.run(2);
    // The answer is in flight; the reads that follow will be lost.
    cluster.network.set_faults(Faults { lose_one_in: 1, ..Faults::default() });
    let start = cluster.tick;
    let (blocks, held) = cluster.fetched(0, &chain, ticket);
    assert!(cluster.tick - start <= 30);
    assert_eq!((blocks, held), (0, 6));
    cluster.network.set_faults(Faults::default());
    cluster.until("they are returned", 60, |cluster| {
        cluster.clients[0].outcomes.iter().any(|outcome| matches!(outcome, Outcome::Returned { .. }))
    });
    cluster.until_connected();
    assert_eq!(cluster.fetch(0, &chain, 100), 6);
    cluster.assert_no_leak();
}

#[test]
fn two_clients_store_the_same_block_once() {
    let mut cluster = cluster(1, 2, 64);
    let chain = chain(1, 10);
    let tickets = [cluster.begin_store(0, &chain, 200), cluster.begin_store(1, &chain, 200)];
    let results: Vec<Vec<StoreResult>> =
        tickets.into_iter().enumerate().map(|(client, ticket)| cluster.stored(client, ticket)).collect();
    for (one, other) in results[0].iter().zip(&results[1]) {
        let pair = [*one, *other];
        assert!(pair.contains(&StoreResult::Stored), "{pair:?}");
        assert!(pair.contains(&StoreResult::Pending) || pair.contains(&StoreResult::Present), "{pair:?}");
    }
    let again = cluster.begin_store(1, &chain, 200);
    assert_eq!(cluster.stored(1, again), [StoreResult::Present; 10]);
    assert_eq!(cluster.server(0).server.block_count(), 10);
    assert_eq!(cluster.fetch(1, &chain, 100), 10);
    cluster.assert_no_leak();
}

#[test]
fn a_full_server_makes_room_but_not_from_what_is_leased() {
    let mut cluster = cluster(1, 2, 8);
    let (old, new) = (chain(1, 8), chain(2, 3));
    cluster.store(0, &old);
    let (now, deadline) = (cluster.now(), cluster.after(100));
    let ticket = cluster.clients[0].pool.look_up(&old, 0, deadline, now).expect("room");
    cluster.outcome(0, |outcome| matches!(outcome, Outcome::Found { .. }));
    let refused = cluster.begin_store(1, &new, 100);
    assert_eq!(cluster.stored(1, refused), [StoreResult::Full; 3]);
    let now = cluster.now();
    cluster.clients[0].pool.cancel(ticket, now);
    cluster.run(3);
    cluster.store(1, &new);
    assert_eq!(cluster.fetch(0, &new, 100), 3);
    assert_eq!(cluster.fetch(0, &old, 100), 5, "leaves went first");
    cluster.assert_no_leak();
}

#[test]
fn a_writer_that_dies_or_hangs_blocks_nobody_for_long() {
    for dies in [true, false] {
        let mut cluster = cluster(1, 2, 8);
        let chain = chain(1, 8);
        cluster.begin_store(0, &chain, 10_000);
        let counters = Arc::clone(cluster.server(0).server.counters());
        cluster.until("slots are reserved", 10, |_| counted(&counters.snapshot(), "reserved_blocks") == 8);
        cluster.clients[0].runs = false;
        let early = cluster.begin_store(1, &chain, 20);
        assert_eq!(cluster.stored(1, early), [StoreResult::Pending; 8]);
        if dies {
            cluster.network.kill(cluster.clients[0].number);
            cluster.run(3);
        } else {
            cluster.until("the fence", 310, |_| counted(&counters.snapshot(), "fences") == 1);
            cluster.run(2);
        }
        cluster.store(1, &chain);
        assert_eq!(cluster.fetch(1, &chain, 100), 8);
        if !dies {
            cluster.clients[0].runs = true;
            cluster.assert_no_leak();
        }
    }
}

#[test]
fn rotten_bytes_are_a_miss_and_the_server_drops_them() {
    let mut cluster = cluster(1, 1, 8);
    let chain = chain(1, 8);
    cluster.store(0, &chain);
    let slab = Arc::clone(cluster.server(0).slots.slab());
    for slot in 0..8 {
        slab.write(slot, 700, &[0xEE; 3]);
    }
    assert_eq!(cluster.fetch(0, &chain, 100), 0);
    cluster.run(10);
    let damaged = counted(&cluster.clients[0].pool.counters().snapshot(), "damaged_blocks");
    assert_eq!(damaged + cluster.server(0).server.block_count() as u64, 8, "what was read is dropped");
    assert!(damaged > 0);
    cluster.assert_no_leak();
}

#[test]
fn bytes_that_are_damaged_on_the_way_are_not_registered() {
    let mut cluster = cluster(1, 1, 64);
    cluster.network.set_faults(Faults { corrupt_one_in: 3, ..Faults::default() });
    let chain = chain(1, 40);
    let ticket = cluster.begin_store(0, &chain, 500);
    let results = cluster.stored(0, ticket);
    let damaged = results.iter().filter(|result| **result == StoreResult::Damaged).count();
    assert!((5..25).contains(&damaged), "{damaged} of 40 with one in three corrupted");
    let good = results.iter().filter(|result| **result == StoreResult::Stored).count();
    assert_eq!((good + damaged, cluster.server(0).server.block_count()), (40, good));
    let leading = results.iter().take_while(|result| **result == StoreResult::Stored).count();
    assert_eq!(cluster.fetch(0, &chain, 100), leading);
    cluster.assert_no_leak();
}

#[test]
fn a_hot_group_gets_a_second_home_that_serves_when_the_first_is_gone() {
    let config = RemoteConfig { hot_count: 3, ..config(7) };
    let mut cluster = Cluster::new(7, Faults::default(), (3, 1), 256, config);
    cluster.until_connected();
    let (hot, cold) = (chain_at(&cluster, 0, 5), chain_at(&cluster, 0, 6));
    assert_ne!(hot[0], chain(99, 1)[0]);
    let cold: Vec<_> = cold.iter().rev().copied().collect();
    cluster.store(0, &hot);
    let homes = |cluster: &mut Cluster| -> usize {
        (0..3).filter(|&at| cluster.server(at).server.block_count() > 0).count()
    };
    for _ in 0..2 {
        assert_eq!(cluster.fetch(0, &hot, 100), 5);
    }
    cluster.run(20);
    assert_eq!(homes(&mut cluster), 1, "twice is not hot");
    assert_eq!(cluster.fetch(0, &hot, 100), 5);
    cluster.run(20);
    assert_eq!(homes(&mut cluster), 2);
    assert_eq!(counted(&cluster.clients[0].pool.counters().snapshot(), "replicated_groups"), 1);
    assert_eq!(cluster.fetch(0, &cold, 100), 0);
    // The first home hangs: the second is asked within the deadline.
    cluster.server(0).runs = false;
    for _ in 0..20 {
        let start = cluster.tick;
        assert_eq!(cluster.fetch(0, &hot, 60), 5);
        assert!(cluster.tick - start <= 30);
    }
    cluster.kill(0);
    cluster.run(5);
    assert_eq!(cluster.fetch(0, &hot, 100), 5);
    cluster.assert_no_leak();
}

#[test]
fn a_second_home_that_lost_blocks_is_forgotten() {
    let config = RemoteConfig { hot_count: 1, ..config(7) };
    let mut cluster = Cluster::new(7, Faults::default(), (2, 1), 16, config);
    cluster.until_connected();
    let hot = chain_at(&cluster, 0, 8);
    cluster.store(0, &hot);
    assert_eq!(cluster.fetch(0, &hot, 100), 8);
    cluster.run(20);
    assert_eq!(cluster.server(1).server.block_count(), 8);
    // Blocks that fill the second home evict the copies.
    for number in 0..60 {
        let other = chain(1000 + number, 8);
        if cluster.home(&other[0]) == 1 {
            cluster.store(0, &other);
        }
    }
    for _ in 0..60 {
        assert_eq!(cluster.fetch(0, &hot, 100), 8, "the first home still has all");
        cluster.run(10);
    }
    cluster.assert_no_leak();
}

#[test]
fn what_is_out_of_bounds_is_refused_and_comes_back() {
    let limits = RemoteConfig { operations_max: 2, blocks_max: 10, ..config(7) };
    let mut cluster = Cluster::new(7, Faults::default(), (1, 1), 16, limits);
    let (now, deadline) = (cluster.now(), cluster.after(100));
    let chain = chain(1, 20);
    let client = &mut cluster.clients[0];
    let targets =
        |count: usize| (0..count).map(|_| client.slots.acquire().expect("slot")).collect::<Vec<_>>();
    let refused = client.pool.fetch(&chain, 0, targets(11), deadline, now).expect_err("too many");
    assert_eq!((refused.reason, refused.targets.len()), (Refusal::TooLong, 11));
    drop(refused);
    let refused = client.pool.fetch(&chain, 15, targets(6), deadline, now).expect_err("beyond the chain");
    assert_eq!((refused.reason, refused.targets.len()), (Refusal::TooLong, 6));
    assert_eq!(client.pool.look_up(&chain[..0], 0, deadline, now), Err(Refusal::TooLong));
    assert!(client.pool.fetch(&chain, 0, targets(3), deadline, now).is_ok());
    assert!(client.pool.look_up(&chain[..5], 0, deadline, now).is_ok());
    let block = block(&chain, 0, &client.slots, GROUP_BLOCKS).expect("slot");
    let (reason, blocks) = client.pool.store(vec![block], deadline, now).expect_err("two are under way");
    assert_eq!((reason, blocks.len()), (Refusal::Full, 1));
    drop((blocks, refused));
    cluster.until_connected();
    cluster.assert_no_leak();
}

/// The check used by all these tests must be able to fail.
#[test]
fn wrong_bytes_with_a_right_checksum_are_noticed_by_the_oracle() {
    let mut cluster = cluster(1, 1, 8);
    let chain = chain(1, 1);
    let (now, deadline) = (cluster.now(), cluster.after(100));
    let client = &mut cluster.clients[0];
    let slot = client.slots.acquire().expect("slot");
    let lie = rig::block_with(&chain, 0, slot, &[9; 8000], GROUP_BLOCKS);
    client.pool.store(vec![lie], deadline, now).expect("room");
    cluster.run(10);
    let ticket = cluster.begin_fetch(0, &chain, 100);
    let outcome = cluster.outcome(0, |outcome| matches!(outcome, Outcome::Fetched { .. }));
    let Outcome::Fetched { ticket: same, blocks, .. } = outcome else { panic!("not fetched") };
    assert_eq!((same, blocks.len()), (ticket, 1));
    assert!(!is_right(&chain[0], &blocks[0].slot, &blocks[0].description));
}
