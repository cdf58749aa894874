//! An engine that is slow for a known reason, watched from the kernel.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use dataplane_ebpf::{EbpfError, EngineProbe, EngineTimes, WatchedEngine};

/// Time until the engine reads a request, and then until it answers.
const READS_AFTER: Duration = Duration::from_millis(40);
const ANSWERS_AFTER: Duration = Duration::from_millis(60);
const REQUESTS: u64 = 10;

/// Number of requests that follow an answer at once, most of them before the engine's send call has returned.
const REQUESTS_AT_ONCE: u64 = 20_000;

fn attached() -> Option<EngineProbe> {
    match EngineProbe::attach() {
        Ok(probe) => Some(probe),
        Err(
            off @ (EbpfError::NotBuilt(_)
            | EbpfError::Capability { .. }
            | EbpfError::NoBtf { .. }
            | EbpfError::PidNamespace { .. }),
        ) => {
            println!("SKIPPED: {off}");
            None
        }
        // Before Linux 6.3 the kernel has no tracepoint of sends.
        Err(EbpfError::Refused { step, reason }) if step.contains("answer_begins") => {
            println!("SKIPPED: {step}: {reason}");
            None
        }
        Err(off) => panic!("{off}"),
    }
}

fn netns() -> u32 {
    std::fs::metadata("/proc/self/ns/net").expect("a network namespace").ino() as u32
}

#[test]
fn requests_that_wait_for_the_engine_are_told_from_those_that_it_computes() {
    let Some(mut probe) = attached() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let engine = WatchedEngine { netns: netns(), port: address.port(), processes: vec![std::process::id()] };
    probe.watch(3, &engine).expect("watched");
    let before = probe.times(3).expect("times");
    let first = listener.try_clone().expect("the same port");
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = first.accept().expect("a client");
        stream.set_nodelay(true).expect("set");
        let mut request = [0; 64];
        for _ in 0..REQUESTS {
            // The engine is busy while the request arrives.
            std::thread::sleep(READS_AFTER);
            let count = stream.read(&mut request).expect("a request");
            assert_eq!(count, 5);
            std::thread::sleep(ANSWERS_AFTER);
            // The answer is sent in two parts; the first one counts.
            stream.write_all(b"first").expect("sent");
            std::thread::sleep(Duration::from_millis(5));
            stream.write_all(b"rest").expect("sent");
        }
    });
    let mut client = TcpStream::connect(address).expect("the engine");
    client.set_nodelay(true).expect("set");
    let mut answer = [0; 9];
    for _ in 0..REQUESTS {
        client.write_all(b"hello").expect("sent");
        client.read_exact(&mut answer).expect("an answer");
    }
    serving.join().expect("no panic");
    let times = probe.times(3).expect("times").since(&before);
    let at = |histogram: &dataplane_ebpf::Histogram| histogram.quantile(0.5).expect("some were counted");
    println!(
        "read after {:?}, answered after {:?}, threads waited {:?} for a processor (p50)",
        at(&times.read_late),
        at(&times.first_byte),
        at(&times.run_queue)
    );
    assert_eq!(times.first_byte.count(), REQUESTS);
    assert!(at(&times.first_byte) >= READS_AFTER + ANSWERS_AFTER, "{:?}", at(&times.first_byte));
    assert_eq!(times.read_late.count(), REQUESTS);
    // The request arrives a moment after the engine has become busy.
    let late = at(&times.read_late);
    assert!(late >= READS_AFTER - Duration::from_millis(5) && late < at(&times.first_byte), "{late:?}");
    assert!(times.run_queue.count() >= REQUESTS);
    drop(client);

    let before = probe.times(3).expect("times");
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        stream.set_nodelay(true).expect("set");
        let mut request = [0; 5];
        for _ in 0..REQUESTS_AT_ONCE {
            stream.read_exact(&mut request).expect("a request");
            stream.write_all(b"answer").expect("sent");
        }
    });
    let mut client = TcpStream::connect(address).expect("the engine");
    client.set_nodelay(true).expect("set");
    let mut answer = [0; 6];
    for _ in 0..REQUESTS_AT_ONCE {
        client.write_all(b"hello").expect("sent");
        client.read_exact(&mut answer).expect("an answer");
    }
    serving.join().expect("no panic");
    let times = probe.times(3).expect("times").since(&before);
    assert_eq!((times.read_late.count(), times.first_byte.count()), (REQUESTS_AT_ONCE, REQUESTS_AT_ONCE));
    assert_eq!(probe.times(2).expect("times"), EngineTimes::default(), "another number is another engine");

    // The engine is no longer watched: another engine has its number.
    let other = WatchedEngine { netns: 1, port: 1, processes: Vec::new() };
    probe.watch(3, &other).expect("watched");
    let before = probe.times(3).expect("times");
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(probe.times(3).expect("times").since(&before).run_queue.count(), 0);
    assert!(probe.watch(EngineProbe::ENGINES_MAX, &other).is_err());

    // An engine that has moved to another number stays watched when its old number gets another engine.
    for (number, engine) in [(3, &engine), (4, &engine), (3, &other)] {
        probe.watch(number, engine).expect("watched");
    }
    let before = probe.times(4).expect("times");
    (0..20).for_each(|_| std::thread::sleep(Duration::from_millis(5)));
    assert!(probe.times(4).expect("times").since(&before).run_queue.count() > 0);
}
