//! Throughput and message rate: rounds of a full window, each beside a round of the peer.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use dataplane_fabric::MESSAGE_BYTES_MAX;

use super::against::{Copies, run_perftest};
use super::args::{Against, Op, Test};
use super::command::Command;
use super::perftest::{Figures, PerftestPlan, Tool};
use super::places::{Shape, shuffled};
use super::report::Record;
use super::responder::fill;
use super::run::Context;
use super::session::Initiator;
use super::statistics::Rounds;
use super::stream::{Plan, Stream};

/// Least number of windows in a round, so that filling and draining one has little weight.
const WINDOWS_MIN: u64 = 8;
const BATCHES_MAX: u64 = 10_000_000;
/// Longest lag of arrivals behind completions, over several rails.
const ARRIVAL_MAX: Duration = Duration::from_secs(5);
/// Most requests in flight that perftest accepts.
const PERFTEST_DEPTH_MAX: u32 = 1024;

/// Result of one round.
struct Round {
    seconds: f64,
    target_bytes_per_s: Option<f64>,
}

/// Measures one size.
pub(super) fn measure(near: &mut Initiator, context: &Context, test: Test, shape: Shape) -> Result<Record> {
    let args = context.args;
    if args.op == Op::Send {
        ensure!(shape.rows.is_none(), "messages have no rows");
        ensure!(shape.bytes as usize <= MESSAGE_BYTES_MAX, "a message has at most {MESSAGE_BYTES_MAX} bytes");
    }
    let capacity = near.node.capacity(shape);
    ensure!(capacity > 0, "a piece of {} bytes does not fit into the memory of both ends", shape.bytes);
    let mut plan = Plan::fitting(args.op, shape, (args.batch, args.depth), capacity);
    plan.batches = args.warmup.max(1);
    let warm = round(near, &plan, args.bidirectional)?;
    plan.batches = args.iterations.unwrap_or_else(|| {
        let share = context.round_seconds();
        (share / (warm.seconds / plan.batches as f64)) as u64
    });
    let least = if args.iterations.is_some() { 1 } else { u64::from(plan.depth) * WINDOWS_MIN };
    plan.batches = plan.batches.clamp(least, BATCHES_MAX);
    let directions = if args.bidirectional { 2.0 } else { 1.0 };
    let mut peer = Peer::new(near, context, &plan)?;
    let (mut rounds, mut target) = (Rounds::default(), Vec::new());
    for _ in 0..context.rounds() {
        let ours = round(near, &plan, args.bidirectional)?;
        let rate = plan.bytes() as f64 * directions / ours.seconds;
        target.extend(ours.target_bytes_per_s);
        let beside = peer.round(near, context, &plan)?;
        rounds.push(rate, beside);
    }
    let wrong_bytes = if args.check { Some(check(near, &plan)?) } else { None };
    Ok(Record {
        test: if test == Test::Rate { "rate" } else { "bw" },
        transport: context.transport.to_owned(),
        op: args.op.name(),
        bytes: u64::from(shape.bytes),
        batch: plan.batch,
        depth: plan.depth,
        rails: args.rails,
        rounds: rounds.count() as u64,
        values: rounds.values(),
        bytes_per_s: Some(rounds.ours()),
        best_bytes_per_s: Some(rounds.best()),
        messages_per_s: Some(rounds.ours() / f64::from(shape.bytes)),
        target_bytes_per_s: (!target.is_empty()).then(|| super::statistics::median(target)),
        peer: rounds.peer().map(|_| peer.name()),
        peer_figure: rounds.peer(),
        ratio: rounds.ratio(),
        wrong_bytes,
        ..Record::default()
    })
}

/// Moves the whole plan, in both directions if wanted, and has the arrivals counted.
fn round(near: &mut Initiator, plan: &Plan, bidirectional: bool) -> Result<Round> {
    near.order(&Command::Reset)?;
    let mut stream = Stream::new(*plan, &near.node);
    let started = Instant::now();
    if bidirectional {
        near.node.send_command(&Command::Stream(*plan))?;
    }
    near.until("completions", |node| {
        let done = stream.pump(node)?;
        node.clear_arrivals();
        Ok(done)
    })?;
    let mut seconds = started.elapsed().as_secs_f64();
    if bidirectional {
        match near.answer()? {
            Command::Done => seconds = started.elapsed().as_secs_f64(),
            other => bail!("a stream was answered with {other:?}"),
        }
        near.node.clear_arrivals();
    }
    let (wanted_immediates, wanted_messages) = match plan.op {
        Op::WriteImm => (plan.batches, 0),
        Op::Send => (0, plan.batches * u64::from(plan.batch)),
        Op::Write | Op::Read => (0, 0),
    };
    let waiting = Instant::now();
    loop {
        let Command::Counted { immediates, messages, span_ns } = near.ask(&Command::Count)? else {
            bail!("a count was answered with something else");
        };
        if (immediates, messages) == (wanted_immediates, wanted_messages) {
            // The span from the first to the last arrival covers all batches but the first.
            let counted = plan.batch_bytes() * immediates.saturating_sub(1);
            let target = (counted > 0 && span_ns > 0).then(|| counted as f64 / (span_ns as f64 / 1e9));
            return Ok(Round { seconds, target_bytes_per_s: target });
        }
        if immediates > wanted_immediates || messages > wanted_messages || waiting.elapsed() > ARRIVAL_MAX {
            bail!(
                "{wanted_immediates} immediates and {wanted_messages} messages completed here, \
                 {immediates} and {messages} arrived there"
            );
        }
    }
}

/// Moves one window of a new pattern. Returns the number of wrong bytes.
fn check(near: &mut Initiator, plan: &Plan) -> Result<u64> {
    // Rails have no order among each other, so a comparison may overtake writes whose arrival is not counted.
    let op = if plan.op == Op::Write && near.node.rail_count() > 1 { Op::WriteImm } else { plan.op };
    let plan = Plan { op, batches: u64::from(plan.depth), ..*plan };
    let (shape, count, seed) = (plan.shape, plan.window(), 0xC0FF_EE00 ^ u64::from(plan.shape.bytes));
    if plan.op == Op::Read {
        fill(&near.node, shape, count, !seed, false, true)?;
        near.order(&Command::Fill { shape, count, seed, out: true })?;
        round(near, &plan, false)?;
        let node = &near.node;
        let wrong = (0..count).map(|index| {
            let place = shape.place(node.slot_bytes(), index);
            let slot = node.in_[place.slot].slot();
            shape.wrong(&node.slab, slot, place.offset, true, seed, shuffled(index, count))
        });
        return wrong.sum();
    }
    fill(&near.node, shape, count, seed, true, true)?;
    near.order(&Command::Fill { shape, count, seed: !seed, out: false })?;
    round(near, &plan, false)?;
    let question = match plan.op {
        Op::Send => Command::CompareMessage { shape, piece: count - 1, seed },
        _ => Command::Compare { shape, count, seed },
    };
    match near.ask(&question)? {
        Command::Compared { wrong } => Ok(wrong),
        other => bail!("a comparison was answered with {other:?}"),
    }
}

/// Peer of a round.
enum Peer {
    None,
    Memcpy { copies: Copies, batches: u64 },
    Perftest(PerftestPlan),
}

impl Peer {
    fn new(near: &Initiator, context: &Context, plan: &Plan) -> Result<Self> {
        match context.args.against {
            Against::None => Ok(Self::None),
            Against::Memcpy => {
                let copies = Copies::new(&near.node, context.layout, context.memory.pages())?;
                // The first copy faults pages in.
                copies.time(&near.node, plan, u64::from(plan.depth));
                let once = copies.time(&near.node, plan, u64::from(plan.depth)) / f64::from(plan.depth);
                let wanted = context.round_seconds().min(0.05) / once.max(1e-9);
                let batches = if context.args.iterations.is_some() { plan.batches } else { wanted as u64 };
                Ok(Self::Memcpy { copies, batches: batches.clamp(1, BATCHES_MAX) })
            }
            Against::Perftest => Ok(Self::Perftest(PerftestPlan {
                tool: Tool::matching(plan.op, Test::Bw),
                bytes: plan.shape.bytes,
                iterations: plan.batches * u64::from(plan.batch),
                depth: plan.window().min(PERFTEST_DEPTH_MAX),
                gid_index: context.args.gid_index,
                bidirectional: context.args.bidirectional,
                port: context.perftest_port(),
            })),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Memcpy { .. } => "memcpy",
            Self::Perftest(plan) => plan.tool.program(),
        }
    }

    /// Bytes per second of the peer.
    fn round(&mut self, near: &mut Initiator, context: &Context, plan: &Plan) -> Result<Option<f64>> {
        match self {
            Self::None => Ok(None),
            Self::Memcpy { copies, batches } => {
                let seconds = copies.time(&near.node, plan, *batches);
                Ok(Some(plan.batch_bytes() as f64 * *batches as f64 / seconds))
            }
            Self::Perftest(plan) => {
                let measured = run_perftest(near, *plan, context.device(), context.perftest_host())?;
                match measured.figures {
                    Figures::Bandwidth { bytes_per_s, .. } => Ok(Some(bytes_per_s)),
                    Figures::Latency { .. } => bail!("{} gave latencies", plan.tool.program()),
                }
            }
        }
    }
}
