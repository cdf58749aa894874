//! Time of one `TransferNode::poll` (a round) while many large hand-offs are in progress. A small hand-off
//! waits for the current round, so the tail matters.
//!
//! One thread polls both nodes in turn; rounds that return 0, and commands, are not timed. All transfers use
//! the same slots, so that the working set stays small; contents are therefore not compared.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use dataplane_fabric::Fabric;
use dataplane_fabric::sim::{Faults, SimNetwork};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_transfer::{Command, Limits, Notice, Outcome, PieceLayout, TransferCounters, TransferNode};

use crate::measure::Latencies;
use crate::rails::MachineRails;
use crate::results;
use crate::transfer::{ANY_ADDRESS, Rails, Unavailable};

const LAYERS: u16 = 4;
/// Most blocks that one peer may reserve at a time, over all of its transfers: the node refuses more.
const BLOCKS_MAX: u64 = 1 << 20;
/// Target for a round at p99.9. A shared machine may miss it: the verdict is printed, and does not fail the run.
const ROUND_TIME_MAX: Duration = Duration::from_micros(200);
/// Time after which the run fails if no hand-off has ended.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
const TRANSPORTS: [&str; 4] = ["sim", "shm", "tcp", "rdma"];

/// Hand-offs between two nodes of this process.
#[derive(Debug, Clone, Args)]
pub(crate) struct HandOffArgs {
    /// Transport: sim (a simulated fabric), shm, tcp, rdma, or all of them one after the other.
    #[arg(long, default_value = "all")]
    transport: String,
    /// Hand-offs in progress.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=255))]
    transfers: u64,
    /// Blocks of each hand-off.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    blocks: u32,
    /// Bytes of a block.
    #[arg(long, default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(64..=16_777_216))]
    block_bytes: u32,
}

/// Lets clap supply the defaults.
#[derive(clap::Parser)]
struct Defaults {
    #[command(flatten)]
    args: HandOffArgs,
}

impl HandOffArgs {
    pub(crate) fn with_defaults() -> Self {
        <Defaults as clap::Parser>::parse_from(["hand-off"]).args
    }
}

/// One of the two nodes.
struct Side {
    node: TransferNode<Box<dyn Fabric>>,
    counters: Arc<TransferCounters>,
    slots: Vec<SlotRef>,
    notices: Vec<Notice>,
    rounds: Latencies,
}

impl Side {
    /// Creates the fabric over the slab of the side's slots. Returns its address too.
    fn new(
        args: &HandOffArgs,
        make: impl FnOnce(Arc<Slab>) -> Result<(Box<dyn Fabric>, String)>,
    ) -> Result<(Self, String)> {
        let layout = PieceLayout::whole(LAYERS, args.block_bytes / u32::from(LAYERS), 1);
        let slots = SlabLayout { slot_bytes: layout.slot_bytes(), slot_count: args.blocks };
        let slab = Arc::new(Slab::create("hand-off", slots, PageSize::HugeIfAvailable)?);
        let pool = SlotPool::new(Arc::clone(&slab));
        let slots: Vec<SlotRef> = std::iter::from_fn(|| pool.acquire()).collect();
        for slot in &slots {
            // Touch all pages now, so that none are faulted in while rounds are timed.
            let bytes: Vec<u8> =
                (0..layout.slot_bytes()).map(|at| (slot.slot() as usize + at) as u8).collect();
            slab.write(slot.slot(), 0, &bytes);
        }
        let (fabric, address) = make(slab)?;
        let counters = Arc::new(TransferCounters::default());
        let limits = Limits { lease: Duration::from_secs(3600), ..Limits::default() };
        let node = TransferNode::new(fabric, layout, limits, Arc::clone(&counters));
        Ok((Self { node, counters, slots, notices: Vec::new(), rounds: Latencies::new()? }, address))
    }

    fn poll(&mut self) {
        let started = Instant::now();
        if self.node.poll(started, &mut self.notices) > 0 {
            self.rounds.record(started.elapsed());
        }
    }

    fn counter(&self, name: &str) -> u64 {
        let counters = self.counters.snapshot();
        counters.into_iter().find(|(known, ..)| *known == name).map_or(0, |(.., value)| value)
    }
}

pub(crate) fn run(args: &HandOffArgs, smoke: bool) -> Result<()> {
    let mut args = args.clone();
    if smoke {
        (args.transfers, args.blocks) = (args.transfers.min(8), args.blocks.min(64));
    }
    ensure!(
        args.transfers * u64::from(args.blocks) <= BLOCKS_MAX,
        "{} transfers of {} blocks: a peer may reserve {BLOCKS_MAX} blocks at a time",
        args.transfers,
        args.blocks
    );
    ensure!(
        args.block_bytes.is_multiple_of(u32::from(LAYERS)),
        "--block-bytes must be a multiple of {LAYERS}"
    );
    let all = args.transport == "all";
    let transports = if all { TRANSPORTS.to_vec() } else { vec![args.transport.as_str()] };
    for transport in transports {
        match measure(transport, &args) {
            Err(error) if all && error.is::<Unavailable>() => println!("{transport}: {error:#}"),
            outcome => outcome.with_context(|| transport.to_owned())?,
        }
    }
    Ok(())
}

fn measure(transport: &str, args: &HandOffArgs) -> Result<()> {
    let network = SimNetwork::new(1, Faults { queue_depth_max: 256, ..Faults::default() });
    let rails = MachineRails::new(&[], None)?;
    let make = |slab: Arc<Slab>, listen: Option<&str>| -> Result<(Box<dyn Fabric>, String)> {
        match transport {
            "sim" => Ok((Box::new(network.add_node(slab)), "0".to_owned())),
            _ => rails.make(transport, slab, listen, 0),
        }
    };
    // The receiver connects to the sender.
    let (mut sender, address) = Side::new(args, |slab| make(slab, Some(ANY_ADDRESS)))?;
    let (mut receiver, _) = Side::new(args, |slab| make(slab, None))?;
    let started = Instant::now();
    for transfer in 1..=args.transfers {
        let content = [transfer as u8; 16];
        let (slots, deadline) = (receiver.slots.clone(), started + Duration::from_secs(3600));
        let expect =
            Command::Expect { transfer, address: address.clone(), content, first_block: 0, slots, deadline };
        receiver.node.handle(expect, started);
        for layer in 0..LAYERS {
            let slots = sender.slots.clone();
            let push = Command::Push { transfer, content, first_block: 0, slots, layers: layer..layer + 1 };
            sender.node.handle(push, started);
        }
        sender.node.handle(Command::PushEnd { transfer }, started);
    }
    let (mut arrived, mut last) = (0, started);
    while arrived < args.transfers {
        sender.poll();
        receiver.poll();
        network.advance(1);
        for notice in receiver.notices.drain(..) {
            let Notice::Arrived { transfer, outcome, .. } = notice else { continue };
            ensure!(outcome == Outcome::Complete, "transfer {transfer} ended as {outcome:?}");
            (arrived, last) = (arrived + 1, Instant::now());
        }
        if last.elapsed() > STALL_TIMEOUT {
            bail!("{arrived} of {} transfers have arrived, and none for {STALL_TIMEOUT:?}", args.transfers);
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let [sent, summed] = ["bytes_sent", "bytes_summed"].map(|name| sender.counter(name));
    let expected = args.transfers * u64::from(args.blocks) * u64::from(args.block_bytes);
    ensure!(sent == expected && summed == expected, "{sent} bytes sent, {summed} summed, of {expected}");
    println!(
        "{transport}: {} transfers of {} blocks of {} bytes, {:.2} GB/s, {summed} bytes summed for {sent} sent",
        args.transfers,
        args.blocks,
        args.block_bytes,
        sent as f64 / seconds / 1e9
    );
    for (name, side) in [("sender", &sender), ("receiver", &receiver)] {
        let tail = side.rounds.at(0.999);
        let verdict = if tail <= ROUND_TIME_MAX.as_nanos() as f64 { "met" } else { "missed" };
        results::add_latencies("hand-off", &format!("a round of the {name}, {transport}"), &side.rounds);
        println!(
            "  a round of the {name}: p50 / p99 / p99.9 {}, longest {:.0} us, of {}; at most {} us at p99.9: {verdict}",
            side.rounds.render(),
            side.rounds.at(1.0) / 1e3,
            side.rounds.count(),
            ROUND_TIME_MAX.as_micros()
        );
    }
    Ok(())
}
