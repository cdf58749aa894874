//! The tiers below host memory, with real processes: blocks on the disk survive a killed worker, another
//! node's memory and a folder of objects serve blocks that this node has lost, and the Redis protocol serves
//! values from the same tiers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::support::{Cluster, Process, Scratch, free_address, prompt, request, wait_for};
use serde_json::Value;

const PREFIX: usize = 800;
const BLOCKS: f64 = 49.0;

fn answer(cluster: &Cluster, seed: u64) -> (Value, usize) {
    answer_to(cluster, seed, PREFIX)
}

fn answer_to(cluster: &Cluster, seed: u64, tokens: usize) -> (Value, usize) {
    let answer = cluster.complete(&request(&prompt(seed, tokens), 8));
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    (answer["choices"][0].clone(), cached as usize)
}

#[test]
fn a_killed_worker_comes_back_with_its_disk() {
    let folder = Scratch::new("disk-tier-files");
    let config = format!(
        "[engine]\nblocks = 160\n[host_tier]\ncapacity = \"1 MiB\"\n[disk_tier]\ncapacity = \"32 MiB\"\nsegment = \"8 MiB\"\n\
         path = \"{}\"\n",
        folder.0.display()
    );
    let mut cluster = Cluster::start("disk-tier", &["both"], &config);
    let expected: Vec<Value> = (0..4).map(|seed| answer(&cluster, seed).0).collect();
    wait_for("blocks to be written", || cluster.workers[0].metric("kvasir_disk_blocks") >= BLOCKS * 4.0);
    cluster.workers[0].kill();
    cluster.workers[0].restart();
    cluster.workers[0].wait_healthy();
    cluster.wait_ready(1);
    let survivors = cluster.workers[0].metric("kvasir_host_disk_survivor_blocks_total");
    assert!(survivors >= BLOCKS * 3.0, "{survivors} blocks survived");
    // From the first prompts the worker learns the cost of computing and of its disk.
    let mut from_disk = 0.0;
    for round in 0..3 {
        for (seed, expected) in (0..4).zip(&expected) {
            let (choice, _) = answer(&cluster, seed);
            assert_eq!(choice, *expected, "round {round}, prompt {seed}");
        }
        from_disk = cluster.workers[0].metric("kvasir_host_disk_read_blocks_total");
    }
    println!("{survivors} blocks survived a SIGKILL, {from_disk} were read back");
    assert!(from_disk > 0.0);
    assert_eq!(cluster.workers[0].metric("kvasir_host_checksum_failures_total"), 0.0);
}

/// Returns the two transports that every machine has; `KVASIR_TEST_TRANSPORTS=rdma` selects others.
fn transports() -> Vec<String> {
    let named = std::env::var("KVASIR_TEST_TRANSPORTS").unwrap_or_else(|_| "shm,tcp".to_owned());
    named.split(',').map(str::to_owned).collect()
}

/// Starts a store node that is reached over `transport`; returns it with its entry of `remote_tier.nodes`.
fn pool_node(scratch: &Scratch, transport: &str) -> (Process, String) {
    // A second device listens on the port after the first one's, which must be free.
    let (listen, rail, _second_rail) = (free_address(), free_address(), free_address());
    let config = format!(
        "[store]\npool = \"16 MiB\"\nslot = \"16 KiB\"\nlisten = \"{listen}\"\nresp = []\n\
         [transfer]\ntransport = \"{transport}\"\nsocket_folder = \"{}\"\n[rdma]\nlisten = \"{rail}\"\n",
        scratch.0.display()
    );
    let path = scratch.config("store", &config);
    let process = Process::start(&["store", "--config", &path]);
    process.wait_healthy();
    let address = match transport {
        "shm" => scratch.0.join("kvasir-store-pool.sock").display().to_string(),
        "rdma" => rail,
        _ => listen,
    };
    (process, format!("{transport}:{address}"))
}

/// A worker that was killed and restarted gives the same answers, with blocks from the only tier that
/// survives.
fn comes_back_from_afar(name: &str, tier: &str, tokens: usize) -> Cluster {
    let config = format!("[engine]\nblocks = 300\n[host_tier]\ncapacity = \"16 MiB\"\n{tier}");
    let mut cluster = Cluster::start(&format!("far-{name}"), &["both"], &config);
    let expected: Vec<Value> = (0..3).map(|seed| answer_to(&cluster, seed, tokens).0).collect();
    wait_for("blocks to be sent", || {
        cluster.workers[0].metric("kvasir_host_far_written_blocks_total") >= 60.0
    });
    cluster.workers[0].kill();
    cluster.workers[0].restart();
    cluster.workers[0].wait_healthy();
    cluster.wait_ready(1);
    for round in 0..3 {
        for (seed, expected) in (0..3).zip(&expected) {
            assert_eq!(answer_to(&cluster, seed, tokens).0, *expected, "{name}, round {round}");
        }
    }
    let from_far = cluster.workers[0].metric("kvasir_host_far_read_blocks_total");
    println!("{name}: {from_far} blocks came from there; output equal");
    assert!(from_far > 0.0, "{name}");
    cluster
}

#[test]
fn another_nodes_memory_serves_what_this_node_has_lost() {
    for transport in transports() {
        let scratch = Scratch::new(&format!("store-node-{transport}"));
        let (_node, name) = pool_node(&scratch, &transport);
        let tier = format!("[remote_tier]\nnodes = [\"a={name}\"]\ndeadline = \"2s\"\n");
        let cluster = comes_back_from_afar(&transport, &tier, PREFIX);
        let of_node = |name: &str| cluster.workers[0].metric(&format!("kvasir_remote_node_{name}"));
        assert_eq!((of_node("usable"), of_node("damaged_blocks_total")), (1.0, 0.0), "{transport}");
        assert!(of_node("read_blocks_total") > 0.0, "{transport}");
    }
}

#[test]
fn objects_serve_what_this_node_has_lost() {
    let folder = Scratch::new("object-tier-files");
    let tier =
        format!("[object_tier]\nurl = \"file://{}\"\nrun = \"8\"\ndeadline = \"5s\"\n", folder.0.display());
    // Objects are only queried if computing takes long.
    comes_back_from_afar("objects", &tier, 3600);
}

struct Resp(BufReader<TcpStream>);

impl Resp {
    fn open(address: &str) -> Self {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        Self(BufReader::new(stream))
    }

    /// Sends one command; returns the answer's text, `None` for nil.
    fn ask(&mut self, arguments: &[&[u8]]) -> Option<Vec<u8>> {
        let mut command = format!("*{}\r\n", arguments.len()).into_bytes();
        for argument in arguments {
            command.extend(format!("${}\r\n", argument.len()).as_bytes());
            command.extend(*argument);
            command.extend(b"\r\n");
        }
        self.0.get_mut().write_all(&command).expect("it takes the command");
        let mut line = String::new();
        self.0.read_line(&mut line).expect("an answer");
        let line = line.trim_end();
        match line.split_at(1) {
            ("$", "-1") => None,
            ("$", length) => {
                let mut bytes = vec![0; length.parse::<usize>().expect("a length") + 2];
                self.0.read_exact(&mut bytes).expect("the value");
                bytes.truncate(bytes.len() - 2);
                Some(bytes)
            }
            (_, text) => Some(text.as_bytes().to_vec()),
        }
    }
}

#[test]
fn values_over_the_redis_protocol_outlive_the_process() {
    let folder = Scratch::new("resp-files");
    let resp = free_address();
    let config = format!(
        "[store]\npool = \"0 B\"\nslot = \"16 KiB\"\nresp = [\"{resp}\"]\n[host_tier]\ncapacity = \"2 MiB\"\n\
         [disk_tier]\ncapacity = \"32 MiB\"\nsegment = \"8 MiB\"\npath = \"{}\"\n",
        folder.0.display()
    );
    let scratch = Scratch::new("resp");
    let path = scratch.config("store", &config);
    let mut node = Process::start(&["store", "--config", &path]);
    wait_for("the server", || TcpStream::connect(&resp).is_ok());
    let mut client = Resp::open(&resp);
    let value =
        |number: u8, length: usize| -> Vec<u8> { (0..length).map(|at| number ^ (at / 7) as u8).collect() };
    let lengths = [0, 1, 16_384, 16_385, 100_000, 500_000];
    for (number, &length) in (0..).zip(&lengths) {
        let key = [b"key\r\n\0".as_slice(), &[number]].concat();
        assert_eq!(client.ask(&[b"SET", &key, &value(number, length)]).as_deref(), Some(b"OK".as_slice()));
        assert_eq!(client.ask(&[b"GET", &key]), Some(value(number, length)));
        assert_eq!(client.ask(&[b"EXISTS", &key]).as_deref(), Some(b"1".as_slice()));
    }
    let key = [b"key\r\n\0".as_slice(), &[4]].concat();
    assert_eq!(client.ask(&[b"SET", &key, &value(77, 90_000)]).as_deref(), Some(b"OK".as_slice()));
    assert_eq!(client.ask(&[b"GET", &key]), Some(value(77, 90_000)), "a value is replaced");
    assert_eq!(client.ask(&[b"DEL", b"key\r\n\0\x05"]).as_deref(), Some(b"1".as_slice()));
    assert_eq!(client.ask(&[b"GET", b"key\r\n\0\x05"]), None);
    // A clean stop flushes everything to the disk; after the restart the latest values are found.
    node.stop();
    node.restart();
    wait_for("the server", || TcpStream::connect(&resp).is_ok());
    let mut client = Resp::open(&resp);
    assert_eq!(client.ask(&[b"GET", &key]), Some(value(77, 90_000)));
    for (number, &length) in (0..4).zip(&lengths[1..4]) {
        let number = number + 1;
        let key = [b"key\r\n\0".as_slice(), &[number]].concat();
        assert_eq!(client.ask(&[b"GET", &key]), Some(value(number, length)), "{length} bytes");
    }
    assert_eq!(client.ask(&[b"GET", b"key\r\n\0\x05"]), None, "what was deleted stays so");
}
