//! Runs the options: every transport, test and size, one after the other.

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_memory::SlabLayout;

use super::args::{Against, HOST_ONLY, TRANSPORTS, Test, TransferArgs};
use super::error::Unavailable;
use super::memory::Memory;
use super::perftest::{PerftestPlan, Tool};
use super::places::{self, Shape};
use super::report::Record;
use super::session::{Initiator, Opening, Rails};
use super::{against, bandwidth, latency, memory, plot, post};

/// Exit code of a program that ends with [`Unavailable`]: the convention for skipped tests.
pub const EXIT_UNAVAILABLE: u8 = 77;
const SMOKE_ROUNDS: u32 = 3;
const PERFTEST_PORT: u16 = 18_600;
const PERFTEST_PORTS: u32 = 400;
/// Most rounds with perftest, whose run takes seconds to start.
const PERFTEST_ROUNDS_MAX: u32 = 5;

/// Context of all measurements of one transport.
pub(super) struct Context<'a> {
    pub(super) args: &'a TransferArgs,
    pub(super) transport: &'a str,
    pub(super) layout: SlabLayout,
    pub(super) memory: Memory,
    pub(super) smoke: bool,
    pub(super) allocations: Option<fn() -> u64>,
}

impl Context<'_> {
    pub(super) fn rounds(&self) -> u32 {
        match self.args.against {
            _ if self.smoke => self.args.rounds.min(SMOKE_ROUNDS),
            Against::Perftest => self.args.rounds.min(PERFTEST_ROUNDS_MAX),
            Against::Memcpy | Against::None => self.args.rounds,
        }
    }

    /// Seconds of our side in one round.
    pub(super) fn round_seconds(&self) -> f64 {
        let sides = if self.args.against == Against::None { 1.0 } else { 2.0 };
        self.args.duration.as_secs_f64() / f64::from(self.rounds()) / sides
    }

    pub(super) fn device(&self) -> Option<&str> {
        self.args.devices.first().map(String::as_str)
    }

    /// Host of perftest's server: the host of the address that we connect to.
    pub(super) fn perftest_host(&self) -> &str {
        let address = self.args.connect.first().map_or("127.0.0.1", String::as_str);
        address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']'])
    }

    /// The port depends on the process, so that concurrent runs on one machine do not collide.
    pub(super) fn perftest_port(&self) -> u16 {
        PERFTEST_PORT + (std::process::id() % PERFTEST_PORTS) as u16
    }
}

/// Runs what the options ask for and prints it. `allocations` returns the number of allocations of the calling
/// thread, in a program that counts them.
pub fn run(
    args: &TransferArgs,
    rails: &dyn Rails,
    smoke: bool,
    allocations: Option<fn() -> u64>,
) -> Result<Vec<Record>> {
    let mut args = if smoke { args.clone().smoke() } else { args.clone() };
    check_options(&args)?;
    let (memory, far_memory) = memory_of(&mut args)?;
    let shapes = shapes(&args)?;
    let every: Vec<Shape> = shapes.iter().copied().chain(post_shape(&args)?).collect();
    let layout = places::layout(&every, args.memory_bytes)?;
    let all = args.transport == "all";
    let transports: Vec<&str> = if all { TRANSPORTS.to_vec() } else { vec![args.transport.as_str()] };
    let mut records = Vec::new();
    for transport in transports {
        let opening = Opening { args: &args, rails, transport, layout, memory, far_memory };
        let reached = reaches(transport, memory, far_memory);
        if !args.listen.is_empty() {
            reached?;
            opening.listen()?;
            continue;
        }
        let context = Context { args: &args, transport, layout, memory, smoke, allocations };
        let measured =
            reached.and_then(|()| opening.measure(|near| measure(near, &context, &shapes, &mut records)));
        match measured {
            // For "all", a transport that is not available is skipped with a message.
            Err(error) if all && error.downcast_ref::<Unavailable>().is_some() => {
                println!("{transport}: {error:#}")
            }
            other => other.with_context(|| transport.to_owned())?,
        }
    }
    records.iter().for_each(Record::add);
    if let Some(path) = &args.svg {
        plot::plot(path, &records)?;
    }
    match records.iter().find(|record| record.wrong_bytes.is_some_and(|wrong| wrong > 0)) {
        Some(record) => bail!("wrong bytes arrived: {}", record.line()),
        None => Ok(records),
    }
}

/// Checks that the transport reaches such memory.
fn reaches(transport: &str, memory: Memory, far_memory: Memory) -> Result<()> {
    let is_on_device = memory.is_on_device() || far_memory.is_on_device();
    if is_on_device && HOST_ONLY.contains(&transport) {
        return Err(Unavailable(format!("{transport} moves host memory only")).into());
    }
    Ok(())
}

/// Returns the memory of both ends. Device memory is not compared with copies by the processor.
fn memory_of(args: &mut TransferArgs) -> Result<(Memory, Memory)> {
    let of = |kind| Memory { kind, gpu: args.gpu };
    let ends = (of(args.memory), of(args.far_memory.unwrap_or(args.memory)));
    if ends.0.is_on_device() || ends.1.is_on_device() {
        memory::driver()?;
        match is_alone(args) {
            true => println!("# this end in {}", ends.0),
            false => println!("# from {} to {} and back", ends.0, ends.1),
        }
        if args.against == Against::Memcpy {
            println!("# no memcpy beside it: the processor does not copy device memory");
            args.against = Against::None;
        }
    }
    Ok(ends)
}

/// Whether the other end is in another process.
fn is_alone(args: &TransferArgs) -> bool {
    !args.listen.is_empty() || !args.connect.is_empty()
}

fn check_options(args: &TransferArgs) -> Result<()> {
    ensure!(
        args.far_memory.is_none() || !is_alone(args),
        "--far-memory is the other end's: with --listen or --connect, that program's --memory says it"
    );
    ensure!(args.listen.is_empty() || args.transport != "all", "--listen needs one --transport");
    ensure!(args.connect.is_empty() || args.transport != "all", "--connect needs one --transport");
    for list in [&args.listen, &args.connect] {
        let rails = args.rails as usize;
        ensure!(list.is_empty() || list.len() == rails, "{} addresses for {rails} rails", list.len());
    }
    ensure!(!args.sizes.0.is_empty(), "no sizes");
    Ok(())
}

fn shapes(args: &TransferArgs) -> Result<Vec<Shape>> {
    args.sizes.0.iter().map(|&bytes| Shape::new(bytes, args.rows)).collect()
}

fn post_shape(args: &TransferArgs) -> Result<Option<Shape>> {
    if !args.test.contains(&Test::Post) {
        return Ok(None);
    }
    Shape::new(post::PIECE_BYTES, Some(args.rows.unwrap_or(post::ROWS))).map(Some)
}

fn measure(
    near: &mut Initiator,
    context: &Context,
    shapes: &[Shape],
    records: &mut Vec<Record>,
) -> Result<()> {
    let mut take = |record: Record| {
        println!("{}", record.line());
        records.push(record);
    };
    for &test in &context.args.test {
        if context.args.against == Against::Perftest && test != Test::Post {
            require_perftest(context, test)?;
        }
        match test {
            Test::Bw | Test::Rate => {
                for &shape in shapes {
                    take(bandwidth::measure(near, context, test, shape)?);
                }
            }
            Test::Lat => {
                for &shape in shapes {
                    take(latency::measure(near, context, shape)?);
                }
            }
            Test::Post => {
                if let Some(shape) = post_shape(context.args)? {
                    take(post::measure(near, context, shape)?);
                }
            }
        }
    }
    Ok(())
}

/// Checked before any measurement, so that a missing program is reported early.
fn require_perftest(context: &Context, test: Test) -> Result<()> {
    let plan = PerftestPlan {
        tool: Tool::matching(context.args.op, test),
        bytes: 1,
        iterations: 1,
        depth: 1,
        gid_index: None,
        bidirectional: false,
        port: context.perftest_port(),
    };
    against::require_perftest(&plan, context.device())
}
