//! Decisions of small and large fleets: nothing is allocated, and a large fleet's choice among a few is about as good as
//! one among all.

#![forbid(unsafe_code)]

use router_engines::dialect::{Engine, Role};
use router_fleet::testing::{ready_fleet, ready_phases};
use router_fleet::{Booking, Fleet, Pool, RouteRequest};
use router_policy::{Policy, Strategy};
use router_radix::Tier;
use tests_allocations::{Counting, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK_TOKENS: usize = 16;

fn prompt(family: u32, number: u32, blocks: usize) -> Vec<u32> {
    // Half of each prompt is its family's.
    let token = |at: usize| match at < blocks * BLOCK_TOKENS / 2 {
        true => family * 1_000_000 + at as u32,
        false => family * 1_000_000 + number * 10_000 + at as u32,
    };
    (0..blocks * BLOCK_TOKENS + 1).map(token).collect()
}

fn request(tokens: &[u32]) -> RouteRequest<'_> {
    RouteRequest {
        tokens,
        salt: None,
        session: None,
        adapter: None,
        tokens_are_exact: true,
        without_prefill: false,
        avoid: &[],
        allowed_workers: None,
    }
}

/// Every worker holds the first half of the prompts of its families, and the whole of a few prompts.
fn fill(fleet: &Fleet, prompts: &[Vec<u32>], holders: usize) {
    let roster = fleet.pools()[0].roster();
    for (at, prompt) in prompts.iter().enumerate() {
        let mut hashes = Vec::new();
        kvstore_block::block_hashes(
            prompt,
            BLOCK_TOKENS,
            &kvstore_block::PromptExtras::default(),
            &mut hashes,
        );
        for holder in 0..holders.min(roster.len()) {
            let member = roster[(at * 31 + holder * 17) % roster.len()].run.member;
            let held = if holder % 4 == 0 { hashes.len() } else { hashes.len() / 2 };
            fleet.index.write().stored(member, Tier::Device, None, &hashes[..held], &hashes[..held]);
        }
    }
}

#[test]
fn a_decision_allocates_nothing_in_fleets_of_any_size() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = runtime.enter();
    for workers in [1, 8, 300, 2000] {
        for strategy in Strategy::ALL {
            let fleet = ready_fleet(workers, BLOCK_TOKENS, Policy { strategy, ..Policy::default() });
            let pool = &fleet.pools()[0];
            let prompts: Vec<Vec<u32>> = (0..20).map(|number| prompt(number % 4, number, 12)).collect();
            fill(&fleet, &prompts, 40);
            // Buffers grow with the first decisions.
            for prompt in &prompts {
                drop(fleet.route(pool, &request(prompt)).expect("a route"));
            }
            let during = count(|| {
                for round in 0..2000 {
                    let (_route, mut booking) =
                        fleet.route(pool, &request(&prompts[round % prompts.len()])).expect("a route");
                    booking.first_token();
                }
            });
            assert_eq!(during.allocations, 0, "{workers} workers, {strategy:?}");
        }
    }
    assert_eq!(count(|| drop(std::hint::black_box(Box::new(1)))).allocations, 1, "a planted box is counted");
}

/// The cost of what was chosen, and of the cheapest of all: by the account that is made of every worker.
fn compare(fleet: &Fleet, pool: &Pool, tokens: &[u32], kept: &mut Vec<Booking>) -> (f64, f64) {
    let explained = fleet.explain(pool, &request(tokens));
    let (route, booking) = fleet.route(pool, &request(tokens)).expect("a route");
    kept.push(booking);
    let workers = explained["workers"].as_array().expect("workers");
    let cost = |name: &str| {
        let found = workers.iter().find(|worker| worker["worker"] == name).expect("the chosen one");
        found["predicted_ms"].as_f64().expect("a number")
    };
    let least = workers.iter().filter_map(|worker| worker["predicted_ms"].as_f64()).fold(f64::MAX, f64::min);
    (cost(&route.decode.run.name), least)
}

#[test]
fn a_choice_among_a_few_costs_about_what_a_choice_among_all_would() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = runtime.enter();
    let fleet = ready_fleet(512, BLOCK_TOKENS, Policy::default());
    let pool = &fleet.pools()[0];
    let prompts: Vec<Vec<u32>> = (0..100).map(|number| prompt(number % 10, number, 40)).collect();
    fill(&fleet, &prompts, 60);
    let mut kept: Vec<Booking> = Vec::new();
    let (mut chosen, mut least, mut exact) = (0.0, 0.0, 0);
    const DECISIONS: usize = 2000;
    for round in 0..DECISIONS {
        let (cost, best) = compare(&fleet, pool, &prompts[round * 7 % prompts.len()], &mut kept);
        assert!(cost >= best - 1e-9, "nothing is cheaper than the cheapest");
        chosen += cost;
        least += best;
        exact += usize::from(cost <= best * 1.001);
        // Some requests end, others go on, so that loads differ.
        if round > 700 {
            drop(kept.swap_remove(round * 13 % kept.len()));
        }
    }
    println!("{exact} of {DECISIONS} are the cheapest; in the mean {:.3} of the least cost", chosen / least);
    assert!(exact * 10 >= DECISIONS * 9, "{exact} of {DECISIONS}");
    assert!(chosen <= least * 1.05, "{chosen} against {least}");
}

#[test]
fn a_burst_of_unknown_prompts_spreads_over_a_large_fleet() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = runtime.enter();
    for strategy in [Strategy::PredictedTime, Strategy::Cost, Strategy::LeastLoaded, Strategy::RoundRobin] {
        let fleet = ready_fleet(256, BLOCK_TOKENS, Policy { strategy, ..Policy::default() });
        let pool = &fleet.pools()[0];
        let prompts: Vec<Vec<u32>> = (0..1024).map(|number| prompt(number, 1, 4)).collect();
        let _kept: Vec<_> =
            prompts.iter().map(|prompt| fleet.route(pool, &request(prompt)).expect("a route")).collect();
        let requests = pool.roster().iter().map(|rank| rank.run.load.counts()[0]).collect::<Vec<_>>();
        let (most, least) = (requests.iter().max(), requests.iter().min());
        assert!(most <= Some(&6) && least >= Some(&2), "{strategy:?}: {least:?} to {most:?}, mean 4");
    }
}

/// Names of the workers of so many decisions: those that generate, and those that compute the prompt.
fn taken(fleet: &Fleet, count: usize) -> Vec<(String, Option<String>)> {
    let tokens = prompt(1, 1, 12);
    let routed = |_| {
        let (route, _booking) = fleet.route(&fleet.pools()[0], &request(&tokens))?;
        Some((route.decode.run.name.clone(), route.prefill.map(|rank| rank.run.name.clone())))
    };
    (0..count).filter_map(routed).collect()
}

fn phases(workers: &[(Engine, Role, Option<&str>)]) -> std::sync::Arc<Fleet> {
    ready_phases(workers, BLOCK_TOKENS, Policy { strategy: Strategy::RoundRobin, ..Policy::default() })
}

#[test]
fn taking_turns_uses_all_workers_of_both_phases() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = runtime.enter();
    let (prefill, decode) = ((Engine::Vllm, Role::Prefill, None), (Engine::Vllm, Role::Decode, None));
    let fleet = phases(&[prefill, prefill, decode, decode]);
    let taken = taken(&fleet, 8);
    for name in ["decode-2:8000", "decode-3:8000"] {
        assert_eq!(taken.iter().filter(|(decode, _)| decode == name).count(), 4, "{taken:?}");
    }
    for name in ["prefill-0:8000", "prefill-1:8000"] {
        assert_eq!(
            taken.iter().filter(|(_, prefill)| prefill.as_deref() == Some(name)).count(),
            4,
            "{taken:?}"
        );
    }
}

#[test]
fn phases_of_two_generations_are_not_paired() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = runtime.enter();
    for engine in [Engine::Vllm, Engine::Sglang] {
        // In an order in which taking turns alone would pair old and new.
        let fleet = phases(&[
            (engine, Role::Prefill, Some("old")),
            (engine, Role::Prefill, Some("new")),
            (engine, Role::Decode, Some("new")),
            (engine, Role::Decode, Some("old")),
        ]);
        let mut pairs = taken(&fleet, 8);
        pairs.sort();
        pairs.dedup();
        let pair = |decode: &str, prefill: &str| (decode.to_owned(), Some(prefill.to_owned()));
        assert_eq!(pairs, [pair("decode-2:8000", "prefill-1:8000"), pair("decode-3:8000", "prefill-0:8000")]);
        // The old prefill worker has gone: vLLM's decode worker computes prompts itself, SGLang's gets none.
        let fleet = phases(&[(engine, Role::Prefill, Some("new")), (engine, Role::Decode, Some("old"))]);
        let alone = taken(&fleet, 2);
        match engine {
            Engine::Sglang => assert_eq!(alone, []),
            _ => assert_eq!(alone, vec![("decode-1:8000".to_owned(), None); 2]),
        }
    }
    // More generations than are remembered in a decision.
    let names: Vec<String> = (0..7).map(|number| number.to_string()).collect();
    let of = |role| names.iter().map(move |name| (Engine::Sglang, role, Some(name.as_str())));
    let fleet = phases(&of(Role::Prefill).chain(of(Role::Decode)).collect::<Vec<_>>());
    let mut used: Vec<String> = taken(&fleet, 14).into_iter().map(|(decode, _)| decode).collect();
    used.sort();
    used.dedup();
    assert_eq!(used.len(), 7, "{used:?}");
}
