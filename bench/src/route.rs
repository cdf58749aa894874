//! The routing decision: first in this thread, with the shares of hashing and look-up; then as a live gateway
//! reports it for each request, under open-loop load.

use std::hint::black_box;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kvstore_block::{PromptExtras, block_hashes};
use router_fleet::RouteRequest;
use router_fleet::testing::ready_fleet;
use router_policy::{Policy, Strategy};
use router_radix::{Member, Tier};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tools_workload::{Operation, tree};

use crate::gateway::{MODEL, gateway_over, listen, mock_worker};
use crate::measure::{Latencies, RoundsArgs, time};
use crate::results;

const BLOCK_TOKENS: usize = 16;
const PROMPT_TOKENS: usize = 2048;
/// Number of different prompts: the gateway does not tokenise them, but hashes and looks up each one.
const PROMPTS: usize = 200;
const PARTS: [&str; 4] = ["hash", "look up", "choose, book", "whole"];

pub(crate) fn run(smoke: bool, rounds: RoundsArgs) -> Result<()> {
    println!("# route: prompts of {PROMPT_TOKENS} tokens in blocks of {BLOCK_TOKENS}; p50 / p99 / p99.9");
    let rounds = rounds.or(if smoke { 100 } else { 50_000 });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let inside = runtime.enter();
    for workers in [8, 64, 512, 4096] {
        parts(workers, rounds)?;
    }
    drop(inside);
    for workers in [8, if smoke { 16 } else { 512 }] {
        runtime.block_on(live(workers, smoke))?;
    }
    Ok(())
}

/// Times hashing and look-up by themselves, and a whole decision as the gateway makes it, booking included. As
/// many requests as workers are in flight at any time.
fn parts(workers: usize, rounds: usize) -> Result<()> {
    let policy = Policy { strategy: Strategy::PredictedTime, ..Policy::default() };
    let fleet = ready_fleet(workers, BLOCK_TOKENS, policy);
    let pool = &fleet.pools()[0];
    let members: Vec<Member> = pool.roster().iter().map(|rank| rank.run.member).collect();
    ensure!(members.len() == workers, "the index has no room for {workers} workers");
    let shape = tree::Shape {
        workers,
        chains: PROMPTS,
        holders: (workers / 8).clamp(2, 64),
        ..tree::Shape::default()
    };
    // Tokens first, then their hashes, in the shape of the tree.
    let prompts = tree::prompts(&shape);
    let tokens: Vec<Vec<u32>> = prompts
        .iter()
        .map(|blocks| {
            blocks
                .iter()
                .flat_map(|&hash| (0..BLOCK_TOKENS as u64).map(move |at| (hash >> at) as u32 % 128_000))
                .collect()
        })
        .collect();
    let hashed: Vec<Vec<u64>> = tokens
        .iter()
        .map(|tokens| {
            let mut hashes = Vec::new();
            block_hashes(tokens, BLOCK_TOKENS, &PromptExtras::default(), &mut hashes);
            hashes
        })
        .collect();
    for operation in tree::stores(&shape, &hashed) {
        if let Operation::Stored { worker, parent, blocks } = operation {
            let (hashes, keys): (Vec<u64>, Vec<u64>) = blocks.into_iter().unzip();
            fleet.index.write().stored(members[worker], Tier::Device, parent, &keys, &hashes);
        }
    }
    let mut reader = fleet.index.reader().context("a reader")?;
    let mut latencies = [Latencies::new()?, Latencies::new()?, Latencies::new()?, Latencies::new()?];
    let mut hashes = Vec::with_capacity(256);
    let mut in_flight = std::collections::VecDeque::with_capacity(workers + 1);
    for round in 0..rounds + workers {
        let prompt = &tokens[round * 17 % PROMPTS];
        let (hashing, ()) = time(|| {
            hashes.clear();
            block_hashes(black_box(prompt), BLOCK_TOKENS, &PromptExtras::default(), &mut hashes);
        });
        let (looking_up, _) = time(|| black_box(reader.overlaps(&hashes)));
        let request = RouteRequest {
            tokens: prompt,
            salt: None,
            session: None,
            adapter: None,
            tokens_are_exact: true,
            without_prefill: false,
            avoid: &[],
            allowed_workers: None,
        };
        let (whole, routed) = time(|| fleet.route(pool, &request));
        let (_, mut booking) = routed.context("a choice")?;
        if round % 2 == 0 {
            booking.first_token();
        }
        in_flight.push_back(booking);
        // The first decisions only build up the load.
        if round >= workers {
            let choosing = whole.saturating_sub(hashing + looking_up);
            for (latencies, spent) in latencies.iter_mut().zip([hashing, looking_up, choosing, whole]) {
                latencies.record(spent);
            }
            drop(in_flight.pop_front());
        }
    }
    for (name, latencies) in PARTS.iter().zip(&latencies) {
        results::add_latencies("route", &format!("{name}, {workers} workers"), latencies);
        println!("{workers:>4} workers, {name:<12} {}", latencies.render());
    }
    Ok(())
}

/// Reports the gateway's own figure for each request, from the answer's header.
async fn live(count: usize, smoke: bool) -> Result<()> {
    let mut workers = Vec::new();
    for _ in 0..count {
        workers.push(listen(mock_worker()).await?);
    }
    let gateway = gateway_over(&workers, MODEL).await?;
    let address = gateway.trim_start_matches("http://").to_owned();
    let bodies: Vec<String> = (0..PROMPTS).map(body).collect();
    for body in bodies.iter().take(20) {
        ask(&address, body).await.context("the first requests")?;
    }
    for rate in [200_u32, 1000] {
        let requests = if smoke { 40 } else { rate * 8 };
        let start = Instant::now();
        let mut answers = Vec::new();
        for number in 0..requests {
            tokio::time::sleep_until(start + Duration::from_secs(1) * number / rate).await;
            let (address, body) = (address.clone(), bodies[number as usize * 7 % PROMPTS].clone());
            answers.push(tokio::spawn(async move { ask(&address, &body).await }));
        }
        let mut latencies = [Latencies::new()?, Latencies::new()?, Latencies::new()?, Latencies::new()?];
        for answer in answers {
            let DecisionTimes { hash, look_up, whole } = answer.await??;
            let choose = whole.saturating_sub(hash + look_up);
            for (latencies, spent) in latencies.iter_mut().zip([hash, look_up, choose, whole]) {
                latencies.record(spent);
            }
        }
        for (name, latencies) in PARTS.iter().zip(&latencies) {
            let row = format!("live gateway, {name}, {count} workers, {rate}/s");
            results::add_latencies("route", &row, latencies);
            println!(
                "live gateway, {count:>4} workers, open loop at {rate:>4}/s, {name:<12} {}",
                latencies.render()
            );
        }
    }
    Ok(())
}

fn body(number: usize) -> String {
    // A quarter of the tokens is common to all prompts, the rest differs.
    let token = |at: usize| (if at < PROMPT_TOKENS / 4 { at } else { at * 31 + number * 7919 }) % 200;
    let prompt: Vec<usize> = (0..PROMPT_TOKENS).map(token).collect();
    format!("{{\"model\":\"{MODEL}\",\"prompt\":{prompt:?},\"max_tokens\":8,\"stream\":true}}")
}

/// Durations of a decision as the gateway reports them.
struct DecisionTimes {
    hash: Duration,
    look_up: Duration,
    whole: Duration,
}

/// Sends a request on a connection of its own and reads the whole answer.
async fn ask(address: &str, body: &str) -> Result<DecisionTimes> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let spent = |name: &str| {
        let micros = answer.split(name).nth(1).and_then(|rest| rest.split(['\r', ';']).next());
        let micros: f64 = micros.with_context(|| format!("no {name} in {answer:.200}"))?.trim().parse()?;
        anyhow::Ok(Duration::from_secs_f64(micros / 1e6))
    };
    Ok(DecisionTimes {
        hash: spent("hash_us=")?,
        look_up: spent("lookup_us=")?,
        whole: spent("decided_us=")?,
    })
}
