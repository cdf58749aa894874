//! Time that posting takes in its thread: 10,000 strided descriptors, prepared beforehand, with one doorbell
//! for each batch. Time in which the queue is full is not counted.

use std::time::Instant;

use anyhow::{Result, ensure};
use dataplane_fabric::{Full, WorkRequest};

use super::Op;
use super::piece::Piece;
use super::places::{Shape, shuffled};
use super::report::Record;
use super::run::Context;
use super::session::Initiator;
use super::sizes::RowShape;
use super::statistics::median;

const DESCRIPTORS: u32 = 10_000;
const DESCRIPTORS_SMOKE: u32 = 500;
/// Rows if none are given: a head's 128 bytes in each of 32 tokens.
pub(super) const ROWS: RowShape = RowShape { bytes: 128, local_stride: 512, remote_stride: 1024 };
pub(super) const PIECE_BYTES: u32 = 4096;

/// Times and counts of one round.
struct Costs {
    make_ns: f64,
    post_ns: f64,
    doorbells: u64,
    allocations: Option<u64>,
}

/// Measures a shape with rows, which are always present here.
pub(super) fn measure(near: &mut Initiator, context: &Context, shape: Shape) -> Result<Record> {
    let args = context.args;
    let op = if args.op == Op::Send { Op::Write } else { args.op };
    let count = if context.smoke { DESCRIPTORS_SMOKE } else { DESCRIPTORS };
    let capacity = near.node.capacity(shape);
    ensure!(capacity > 0, "a piece of {} bytes does not fit into the memory of both ends", shape.pitch());
    let mut costs = Vec::new();
    for _ in 0..context.rounds() {
        costs.push(round(near, context, (op, shape), count, capacity)?);
    }
    let of = |get: fn(&Costs) -> f64| median(costs.iter().map(get).collect());
    Ok(Record {
        test: "post",
        transport: context.transport.to_owned(),
        op: op.name(),
        bytes: u64::from(shape.bytes),
        batch: args.batch,
        depth: 1,
        rails: 1,
        rounds: costs.len() as u64,
        values: costs.iter().map(|one| one.post_ns).collect(),
        post_ns: Some(of(|one| one.post_ns)),
        make_ns: Some(of(|one| one.make_ns)),
        doorbells: costs.iter().map(|one| one.doorbells).min(),
        allocations: costs.iter().filter_map(|one| one.allocations).min(),
        ..Record::default()
    })
}

fn round(
    near: &mut Initiator,
    context: &Context,
    (op, shape): (Op, Shape),
    count: u32,
    capacity: u32,
) -> Result<Costs> {
    let batch = context.args.batch;
    let completed_before = near.node.completed;
    let mut requests = Vec::with_capacity(count as usize);
    let started = Instant::now();
    for index in 0..count {
        let local = index % capacity;
        let last = (index + 1).is_multiple_of(batch) || index + 1 == count;
        let remote = shuffled(local, capacity);
        let piece = Piece { op, shape, local, remote, immediate: None, signalled: last };
        requests.push(near.node.request(0, piece)?);
    }
    let make_ns = started.elapsed().as_nanos() as f64 / f64::from(count);
    let allocations_now = || context.allocations.map(|count| count());
    let (mut nanoseconds, mut doorbells, mut allocations) = (0, 0, 0);
    let mut waiting = requests.into_iter().peekable();
    let mut back: Option<WorkRequest> = None;
    while back.is_some() || waiting.peek().is_some() {
        let before = allocations_now();
        let started = Instant::now();
        let mut posted = 0;
        let full = loop {
            if posted == batch {
                break false;
            }
            let Some(request) = back.take().or_else(|| waiting.next()) else { break false };
            if let Err(Full(request)) = near.node.post_request(0, request) {
                back = Some(request);
                break true;
            }
            posted += 1;
        };
        if posted > 0 {
            near.node.flush(0);
            doorbells += 1;
        }
        nanoseconds += started.elapsed().as_nanos();
        allocations += allocations_now().zip(before).map_or(0, |(after, before)| after - before);
        if full {
            near.step()?;
            near.node.require_peer()?;
        }
    }
    let batches = u64::from(count.div_ceil(batch));
    near.until("completions", |node| Ok(node.completed - completed_before >= batches))?;
    Ok(Costs {
        make_ns,
        post_ns: nanoseconds as f64 / f64::from(count),
        doorbells,
        allocations: context.allocations.map(|_| allocations),
    })
}
