//! Latency: writes (notified by an immediate, or polled for), or messages to and fro, halved; whole reads; and
//! whole round trips under open-loop load.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use dataplane_fabric::MESSAGE_BYTES_MAX;

use super::against::run_perftest;
use super::args::{Against, Op, Test};
use super::command::{Command, Echo};
use super::open_loop::OpenLoop;
use super::perftest::{Figures, PerftestPlan, Tool};
use super::piece::Piece;
use super::places::Shape;
use super::report::Record;
use super::responder::{mark_of, number_of, ping};
use super::run::Context;
use super::session::Initiator;
use super::statistics::{Latencies, Percentiles, Rounds};

/// Most round trips if only a duration is given.
const TRIPS_MAX: u64 = 5_000_000;
/// Least size from which on messages carry their number.
const NUMBERED_BYTES_MIN: u32 = 5;
/// Longest wait for answers after the last send of an open loop.
const DRAIN_MAX: Duration = Duration::from_secs(10);

/// Measures one size.
pub(super) fn measure(near: &mut Initiator, context: &Context, shape: Shape) -> Result<Record> {
    let args = context.args;
    if args.op == Op::Send {
        ensure!(shape.bytes as usize <= MESSAGE_BYTES_MAX, "a message has at most {MESSAGE_BYTES_MAX} bytes");
    }
    ensure!(
        near.node.capacity(shape) > 0,
        "a piece of {} bytes does not fit into the memory of both ends",
        shape.bytes
    );
    let op = args.op;
    if op != Op::Read {
        near.order(&Command::Echo(Some(Echo { op, shape })))?;
    }
    // Messages left from a stream of the other end must not be taken for an echo.
    near.node.clear_arrivals();
    let warm = trips(near, op, shape, args.warmup.max(1))?;
    let per_trip = Duration::from_secs_f64(warm.percentiles().p50_us.max(0.01) * 2e-6);
    let count =
        args.iterations.unwrap_or_else(|| (args.duration.as_nanos() / per_trip.as_nanos().max(1)) as u64);
    let count = count.clamp(1, TRIPS_MAX);
    let mut rounds = Rounds::default();
    let mut peer = None;
    let found = match (args.rate, args.against) {
        (Some(rate), _) => {
            ensure!(
                matches!(op, Op::WriteImm | Op::Send) && shape.bytes >= NUMBERED_BYTES_MIN,
                "--rate needs numbered answers: write-imm or send, of 5 bytes or more"
            );
            let count =
                args.iterations.unwrap_or_else(|| (f64::from(rate) * args.duration.as_secs_f64()) as u64);
            under_load(near, op, shape, rate, count.max(1))?
        }
        (None, Against::Perftest) => {
            let plan = PerftestPlan {
                tool: Tool::matching(op, Test::Lat),
                bytes: shape.bytes,
                iterations: count,
                depth: 1,
                gid_index: args.gid_index,
                bidirectional: false,
                port: context.perftest_port(),
            };
            let mut all = Vec::new();
            for _ in 0..context.rounds() {
                let ours = trips(near, op, shape, count)?;
                let beside = run_perftest(near, plan, context.device(), context.perftest_host())?;
                let Figures::Latency { typical_us, .. } = beside.figures else {
                    bail!("bandwidth where latency was due")
                };
                rounds.push(ours.percentiles().p50_us, Some(typical_us));
                all.push(ours.percentiles());
            }
            peer = Some(plan.tool.program());
            median_of(&all)
        }
        (None, _) => trips(near, op, shape, count)?.percentiles(),
    };
    if op != Op::Read {
        near.order(&Command::Echo(None))?;
    }
    Ok(Record {
        test: "lat",
        transport: context.transport.to_owned(),
        op: op.name(),
        bytes: u64::from(shape.bytes),
        batch: 1,
        depth: 1,
        rails: 1,
        rounds: count,
        p50_us: Some(found.p50_us),
        p99_us: Some(found.p99_us),
        p99_9_us: Some(found.p99_9_us),
        max_us: Some(found.max_us),
        min_us: Some(found.min_us),
        mean_us: Some(found.mean_us),
        deviation_us: Some(found.deviation_us),
        load_per_s: args.rate,
        peer,
        peer_figure: rounds.peer(),
        ratio: rounds.ratio(),
        ..Record::default()
    })
}

/// Returns the median of the rounds, percentile by percentile.
fn median_of(all: &[Percentiles]) -> Percentiles {
    let of = |get: fn(&Percentiles) -> f64| super::statistics::median(all.iter().map(get).collect());
    Percentiles {
        p50_us: of(|one| one.p50_us),
        p99_us: of(|one| one.p99_us),
        p99_9_us: of(|one| one.p99_9_us),
        max_us: of(|one| one.max_us),
        min_us: of(|one| one.min_us),
        mean_us: of(|one| one.mean_us),
        deviation_us: of(|one| one.deviation_us),
    }
}

/// Makes round trips one after the other, each waiting for the previous one.
fn trips(near: &mut Initiator, op: Op, shape: Shape, count: u64) -> Result<Latencies> {
    let mut latencies = Latencies::new()?;
    for number in 0..count {
        let started = Instant::now();
        if op == Op::Read {
            let before = near.node.completed;
            let piece = Piece { op, shape, local: 0, remote: 0, immediate: None, signalled: true };
            near.until("room for a read", |node| node.post(0, piece))?;
            near.node.flush(0);
            near.until("a read", |node| Ok(node.completed > before))?;
            latencies.record(started.elapsed());
            continue;
        }
        if op == Op::Write {
            // As in ib_write_lat, each end polls the last byte; no completion reports it.
            let mark = mark_of(&near.node, shape)?.wrapping_add(1);
            near.until("room for a ping", |node| ping(node, op, shape, mark.into()))?;
            near.until("an echo", |node| Ok(mark_of(node, shape)? == mark))?;
            latencies.record(started.elapsed() / 2);
            continue;
        }
        let value = number as u32;
        near.until("room for a ping", |node| ping(node, op, shape, value))?;
        near.until("an echo", |node| Ok(!node.immediates.is_empty() || !node.messages.is_empty()))?;
        latencies.record(started.elapsed() / 2);
        for answered in answers(near) {
            ensure!(
                answered == value || (op == Op::Send && shape.bytes < NUMBERED_BYTES_MIN),
                "ping {value} was answered as {answered}"
            );
        }
    }
    Ok(latencies)
}

/// Sends at scheduled times; each latency is a whole round trip from the scheduled time.
fn under_load(near: &mut Initiator, op: Op, shape: Shape, rate: u32, count: u64) -> Result<Percentiles> {
    let mut latencies = Latencies::new()?;
    let mut plan = OpenLoop::new(Instant::now(), rate, count);
    let last = plan.set_time(count);
    while latencies.count() < count {
        let now = Instant::now();
        while let Some(number) = plan.due(now) {
            if !ping(&mut near.node, op, shape, number as u32)? {
                plan.put_back();
                break;
            }
        }
        near.step()?;
        near.node.require_peer()?;
        let arrived = answers(near);
        if arrived.is_empty() {
            if now > last + DRAIN_MAX {
                bail!(
                    "{} of {count} answers came until {DRAIN_MAX:?} after the last send",
                    latencies.count()
                );
            }
            continue;
        }
        let now = Instant::now();
        for number in arrived {
            latencies.record(now.saturating_duration_since(plan.set_time(u64::from(number))));
        }
    }
    Ok(latencies.percentiles())
}

/// Takes the numbers of the answers that have arrived.
fn answers(near: &mut Initiator) -> Vec<u32> {
    let mut numbers = std::mem::take(&mut near.node.immediates);
    let taken = numbers.clone();
    numbers.clear();
    near.node.immediates = numbers;
    taken.into_iter().chain(near.node.messages.drain(..).map(|message| number_of(&message))).collect()
}
