//! Whole runs: over the simulated fabric with one thread, over a queue between two threads, and as two "processes".

use anyhow::Result;
use clap::Parser;
use dataplane_fabric::sim::Faults;

use super::args::MemoryKind;
use super::fakes::{QueueRails, SimRails};
use super::memory::Memory;
use super::places::{self, Shape};
use super::run::{Context, run};
use super::session::Opening;
use super::{Record, TransferArgs, Unavailable, latency};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: TransferArgs,
}

fn args(line: &str) -> TransferArgs {
    Cli::parse_from(std::iter::once("transfer").chain(line.split_whitespace())).args
}

fn queue_rails() -> &'static QueueRails {
    Box::leak(Box::default())
}

fn simulated(line: &str) -> Result<Vec<Record>> {
    let line = format!(
        "--transport sim --threads one --sizes 64,4K --iterations 6 --rounds 3 --batch 4 --check {line}"
    );
    run(&args(&line), &SimRails::default(), false, None)
}

#[test]
fn every_operation_runs_over_the_simulated_fabric_and_brings_the_right_bytes() {
    for op in ["write", "read", "send", "write-imm"] {
        for more in ["", "--bidirectional", "--rails 2", "--depth 5"] {
            let records = simulated(&format!("--op {op} --test bw {more}"))
                .unwrap_or_else(|e| panic!("{op} {more}: {e:#}"));
            assert_eq!(records.len(), 2);
            for record in &records {
                assert_eq!(record.wrong_bytes, Some(0), "{op} {more}: {record:?}");
                assert!(
                    record.bytes_per_s > Some(0.0)
                        && record.ratio > Some(0.0)
                        && record.peer == Some("memcpy")
                );
                assert_eq!(record.target_bytes_per_s.is_some(), op == "write-imm", "{op}");
            }
        }
    }
}

#[test]
fn rows_land_at_their_strides() {
    for op in ["write", "read", "write-imm"] {
        let records = simulated(&format!("--op {op} --test bw --rows 16:48:80")).expect(op);
        assert!(records.iter().all(|record| record.wrong_bytes == Some(0)), "{op}: {records:?}");
    }
}

#[test]
fn corrupted_bytes_are_found() {
    let faults = Faults { corrupt_one_in: 3, ..Faults::default() };
    let line =
        "--transport sim --threads one --op write --test bw --sizes 4K --iterations 4 --rounds 3 --check";
    let error = run(&args(line), &SimRails { faults }, false, None).expect_err("bits were flipped");
    assert!(format!("{error:#}").contains("wrong bytes arrived"), "{error:#}");
}

#[test]
fn latency_rate_and_posting() {
    for op in ["write", "write-imm", "read", "send"] {
        let records = simulated(&format!("--op {op} --test lat --test rate --test post")).expect(op);
        let [lat, ..] = &records[..] else { panic!("{records:?}") };
        assert!(lat.p50_us > Some(0.0) && lat.p50_us <= lat.p99_us && lat.p99_9_us <= lat.max_us, "{lat:?}");
        assert_eq!(lat.rounds, 6);
        let post = records.last().expect("records");
        assert_eq!(post.test, "post");
        assert!(post.post_ns > Some(0.0) && post.make_ns > Some(0.0));
        assert!(post.doorbells >= Some(10_000 / 4), "one for each batch at least: {post:?}");
    }
    let records = simulated("--test lat --op write-imm --rate 20000").expect("under load");
    assert!(records.iter().all(|record| record.load_per_s == Some(20_000) && record.p50_us > Some(0.0)));
}

#[test]
fn two_threads_and_two_processes_measure_the_same_things() {
    let rails = queue_rails();
    for op in ["write", "read", "send", "write-imm"] {
        let line = format!("--transport queue --sizes 64,4K --op {op} --iterations 20 --rounds 3 --check");
        let records =
            run(&args(&line), &rails, false, None).unwrap_or_else(|error| panic!("{op}: {error:#}"));
        assert_eq!(records.len(), 4, "two tests of two sizes");
        let both_ways = args(&format!("{line} --bidirectional --depth 8"));
        let records_both = run(&both_ways, &rails, false, None);
        assert_eq!(records_both.unwrap_or_else(|error| panic!("{op}, both ways: {error:#}")).len(), 4);
        assert!(
            records.iter().filter(|record| record.test == "bw").all(|record| record.wrong_bytes == Some(0))
        );
    }
    let line = "--transport queue --sizes 4K --iterations 20 --rounds 3 --check";
    std::thread::scope(|scope| {
        let far = scope.spawn(|| run(&args(&format!("{line} --listen here")), &rails, false, None));
        while !rails.addresses.lock().expect("lock").contains_key("here") {
            std::thread::yield_now();
        }
        let near = run(&args(&format!("{line} --connect here")), &rails, false, None).expect("the near end");
        assert_eq!(near.len(), 2);
        assert!(far.join().expect("no panic").expect("the far end leaves in peace").is_empty());
    });
}

#[test]
fn failures_name_their_cause_and_end_both_threads() {
    let rails = queue_rails();
    for (line, expected) in [
        ("--transport broken", "never opens"),
        ("--transport queue --connect nowhere", "nobody listens"),
        ("--transport queue --op send --sizes 128K", "at most 65536"),
        ("--transport queue --sizes 16M --memory-bytes 32M", "--memory-bytes"),
        ("--transport queue --rows 100:100:100 --sizes 64", "whole rows"),
        ("--listen here", "one --transport"),
        ("--transport queue --connect a,b", "2 addresses for 1 rails"),
        ("--transport queue --connect a --far-memory host", "--far-memory is the other end's"),
        ("--transport queue --sizes 64 --test lat --op read --rate 10", "write-imm or send"),
    ] {
        let error = format!("{:#}", run(&args(line), &rails, false, None).expect_err(line));
        assert!(error.contains(expected), "{line}: {error}");
    }
}

#[test]
fn what_is_not_here_is_unavailable() {
    let rails = queue_rails();
    let error = run(&args("--memory gpu"), &rails, false, None).expect_err("no GPU");
    assert!(error.downcast_ref::<Unavailable>().is_some() && error.to_string().contains("no GPU here"));
    // No machine has a device of this name.
    let line = "--transport queue --against perftest --sizes 64 --devices none-such-0";
    let error = run(&args(line), &rails, false, None).expect_err("no device");
    assert!(error.downcast_ref::<Unavailable>().is_some(), "{error:#}");
    // "all" skips transports that a simulation does not have.
    assert_eq!(run(&args("--threads one --sizes 64"), &SimRails::default(), false, None).expect("skips"), []);
}

#[test]
fn the_picture_has_every_transport() {
    let folder = std::env::temp_dir().join(format!("bench-transfer-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let svg = folder.join("out.svg");
    let line = format!("--test bw --test lat --svg {}", svg.display());
    for record in simulated(&line).expect("runs") {
        let value = serde_json::to_value(&record).expect("an object");
        assert_eq!(value["bytes"], record.bytes);
        assert_eq!(value.get("p50_us").is_some(), record.test == "lat", "absent fields are left out");
        assert!(record.test == "lat" || !record.values.is_empty());
    }
    let picture = std::fs::read_to_string(&svg).expect("svg");
    assert!(
        picture.contains("<svg")
            && picture.contains("sim write-imm")
            && picture.contains("memcpy beside sim")
    );
    std::fs::remove_dir_all(&folder).expect("clean");
}

/// After a stream in both directions, messages may be left that arrived after the last poll.
#[test]
fn what_a_stream_left_behind_is_not_taken_for_an_echo() {
    let args = args("--transport sim --threads one --op send --sizes 64 --iterations 5");
    let shape = Shape::new(64, None).expect("a shape");
    let layout = places::layout(&[shape], 1 << 20).expect("a layout");
    let memory = Memory { kind: MemoryKind::Host, gpu: 0 };
    let (transport, rails) = ("sim", SimRails::default());
    let opening = Opening { args: &args, rails: &rails, transport, layout, memory, far_memory: memory };
    let context = Context { args: &args, transport, layout, memory, smoke: false, allocations: None };
    let measured = opening.measure(|near| {
        near.node.messages.push(vec![0, 9, 0, 0, 0].into_boxed_slice());
        near.node.immediates.push(9);
        latency::measure(near, &context, shape).map(drop)
    });
    measured.expect("every ping gets its own echo");
}

/// On a machine with an RDMA device and perftest (such as the lab's virtual machine), its programs run beside
/// ours as child processes, and their output is parsed.
#[test]
fn perftest_runs_beside_ours() {
    let Some(device) =
        std::fs::read_dir("/sys/class/infiniband").ok().and_then(|mut found| found.next()?.ok())
    else {
        eprintln!("SKIPPED: no RDMA device on this machine");
        return;
    };
    let device = device.file_name();
    let rails = queue_rails();
    for (op, peer) in [("write", "ib_write"), ("read", "ib_read"), ("send", "ib_send")] {
        let line = format!(
            "--transport queue --sizes 64,4K --iterations 20 --rounds 3 --bidirectional --op {op} \
             --against perftest --devices {} --gid-index 1",
            device.display()
        );
        let records =
            run(&args(&line), &rails, false, None).unwrap_or_else(|error| panic!("{op}: {error:#}"));
        assert_eq!(records.len(), 4);
        for record in &records {
            assert!(record.peer.is_some_and(|name| name.starts_with(peer)), "{record:?}");
            assert!(record.peer_figure > Some(0.0) && record.ratio > Some(0.0));
        }
    }
}

/// The script that measures the peers starts our side with these words.
#[test]
fn the_options_of_the_peers_script_are_understood() {
    let args = args(
        "--transport shm --depth 1 --memory-bytes 512M --rounds 11 --test bw --check --op write \
         --sizes 16777216 --batch 8",
    );
    assert_eq!((args.batch, args.depth, args.test.len(), args.memory_bytes), (8, 1, 1, 512 << 20));
    assert_eq!(args.sizes.0, [16 << 20]);
}
