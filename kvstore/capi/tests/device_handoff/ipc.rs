//! Hand-offs between the device memories of two processes of one host. The sender is a process of its own,
//! because the driver does not attach memory in the process that exported it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::*;

/// Environment variable with the seed of the sender's tensors, set in the sender's process.
const SENDER: &str = "KVASIR_TEST_IPC_SENDER";
/// Prefix of the sender's lines, among those of the test harness.
const SAYS: &str = "sender: ";

fn over_ipc(more: &str) -> String {
    configuration("cuda_ipc", &format!("{ON_DEVICE}direct = true\n"), more)
}

/// A prefill engine in its own process, controlled line by line.
struct Sender {
    child: Child,
    tells: ChildStdin,
    says: BufReader<ChildStdout>,
    address: String,
    /// A copy of the sender's tensors.
    engine: Engine,
}

impl Sender {
    fn start(device: &Device, seed: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--ignored", "--exact", "ipc::a_sender_in_this_process", "--nocapture"])
            .env(SENDER, seed.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("run");
        let tells = child.stdin.take().expect("piped");
        let says = BufReader::new(child.stdout.take().expect("piped"));
        let engine = on_device(device, &mut Random(seed));
        let mut sender = Self { child, tells, says, address: String::new(), engine };
        sender.address = sender.heard();
        sender
    }

    fn heard(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.says.read_line(&mut line).expect("a line") > 0, "the sender has ended");
            if let Some((_, said)) = line.split_once(SAYS) {
                return said.trim().to_owned();
            }
        }
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.tells, "{command}").expect("the sender lives");
    }

    /// Pushes blocks layer by layer, and ends the hand-off.
    fn push(&mut self, transfer: u64, blocks: &[u64]) {
        let blocks: Vec<String> = blocks.iter().map(u64::to_string).collect();
        self.tell(&format!("push {transfer} {}", blocks.join(" ")));
    }

    /// Returns the number of transfers sent directly, and of those staged.
    fn sent(&mut self) -> (u64, u64) {
        self.tell("statistics");
        let said = self.heard();
        let mut numbers = said.split(' ').map(|number| number.parse().expect("a number"));
        (numbers.next().expect("one"), numbers.next().expect("two"))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // The sender may have ended already.
        let _gone = self.child.kill();
        let _status = self.child.wait();
    }
}

/// Run in a process of its own by the tests below.
#[test]
#[ignore = "the other side of hand-offs between processes"]
fn a_sender_in_this_process() {
    let Ok(seed) = std::env::var(SENDER) else { return };
    let Some((_double, device, image)) = device() else { return };
    let mut random = Random(seed.parse().expect("a number"));
    let side = Side::over(&device, &image, &mut random, &over_ipc(""));
    println!("{SAYS}{}", side.address());
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let mut words = line.split(' ');
        match words.next() {
            Some("push") => {
                let mut numbers = words.map(|word| word.parse::<u64>().expect("a number"));
                let transfer = numbers.next().expect("a transfer");
                let blocks: Vec<u64> = numbers.collect();
                for layer in 0..LAYERS {
                    assert_eq!(side.push(transfer, 0, &blocks, layer..layer + 1), 0);
                }
                side.end(transfer);
                for _ in 0..LAYERS {
                    assert_eq!(side.ended().0, 0);
                }
            }
            Some("statistics") => {
                side.wait_for_rest();
                let statistics = side.statistics();
                println!("{SAYS}{} {}", statistics.sent_directly, statistics.sent_staged);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn engines_of_one_host_hand_over_between_their_devices_memory() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(801));
    let name = format!("test-{}", std::process::id());
    let mut decode = Side::over(&device, &image, random, &over_ipc(&format!("socket_name = {name:?}\n")));
    // As in `handoff.place` of the connector.
    let socket = format!("/kvasir-{name}-device.sock");
    assert!(decode.address().ends_with(&socket), "{}", decode.address());
    let mut sender = Sender::start(&device, 802);
    assert!(sender.address.starts_with("cuda_ipc:"), "{}", sender.address);
    for round in 0..HAND_OFFS {
        let transfer = transfer_id();
        let count = 1 + random.below(BLOCKS as u64) as usize;
        let (from, to) = (shuffled(random, BLOCKS), shuffled(random, BLOCKS));
        let (from, to) = (&from[..count], &to[..count]);
        let is_early = round % 2 == 0;
        if is_early {
            assert_eq!(decode.expect(transfer, &sender.address, 0, to), 0);
        }
        sender.push(transfer, from);
        if !is_early {
            assert_eq!(decode.expect(transfer, &sender.address, 0, to), 0);
        }
        assert_eq!(decode.ended(), (0, count as u64, COMPLETE));
        for (from, to) in from.iter().zip(to) {
            decode.engine.put(*to, &sender.engine.payload(*from));
        }
        assert!(decode.engine.read() == decode.engine.bytes, "these blocks and no others");
    }
    decode.wait_for_rest();
    assert_eq!(sender.sent(), (HAND_OFFS, 0));
    let statistics = decode.statistics();
    assert_eq!((statistics.received_directly, statistics.received_staged), (HAND_OFFS, 0));
    assert_eq!(statistics.checksum_failures, 0);
}

/// The sender is killed at random moments: arrived blocks are right, missing ones are reported soon, no
/// resource stays in use, and the next sender works like the first.
#[test]
fn a_sender_that_is_killed_leaves_nothing_behind() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(803));
    let mut decode = Side::over(&device, &image, random, &over_ipc(""));
    let (mut whole, mut missing) = (0, 0);
    for round in 0..5 {
        let mut sender = Sender::start(&device, 900 + round);
        let blocks: Vec<u64> = shuffled(random, BLOCKS);
        let transfers: Vec<(u64, &[u64])> = blocks.chunks(8).map(|to| (transfer_id(), to)).collect();
        for (transfer, to) in &transfers {
            assert_eq!(decode.expect(*transfer, &sender.address, 0, to), 0);
            sender.push(*transfer, to);
        }
        // Killed between two hand-offs, or within the next one.
        let (before, pause) = (round as usize * 2, Duration::from_micros(random.below(20_000)));
        let mut killed = None;
        for ended in 0..transfers.len() {
            if ended == before {
                std::thread::sleep(pause);
                sender.child.kill().expect("it runs");
                killed = Some(Instant::now());
            }
            let end = decode.rig.poll(PATIENCE);
            let (_, to) = transfers.iter().find(|(transfer, _)| *transfer == end.user).expect("one of ours");
            if end.status == 0 {
                whole += 1;
            } else {
                missing += 1;
            }
            for block in &to[..end.payload_bytes as usize] {
                decode.engine.put(*block, &sender.engine.payload(*block));
            }
        }
        decode.wait_for_rest();
        let noticed = killed.expect("killed").elapsed();
        assert!(noticed < Duration::from_secs(5), "{noticed:?}");
        assert!(decode.engine.read() == decode.engine.bytes, "round {round}");
    }
    println!("{whole} hand-offs before the end of their sender, {missing} not");
    assert!(whole >= 20 && missing > 0, "{whole} and {missing}");
    assert_eq!(decode.statistics().checksum_failures, 0);
}

/// The driver does not attach memory in the process that exported it, so the network card is used.
#[test]
fn memory_that_the_driver_does_not_share_goes_over_the_card() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(804));
    let side = |random: &mut Random| {
        let card = card(&device, DMA_BUF);
        let rdma = format!("[rdma]\ndevices = [{:?}]\n", card.name());
        let text = configuration("auto", &format!("{ON_DEVICE}direct = true\n"), &rdma);
        Side::over(&device, &image, random, &text)
    };
    let (prefill, mut decode) = (side(random), side(random));
    let (transfer, from, to) = (transfer_id(), [9, 3, 60], [40, 41, 2]);
    let address = prefill.address();
    assert!(address.starts_with("cuda_ipc:") && address.contains(",rdma:"), "{address}");
    assert_eq!(decode.expect(transfer, &address, 0, &to), 0);
    assert_eq!(prefill.push(transfer, 0, &from, 0..LAYERS), 0);
    prefill.end(transfer);
    assert_eq!(decode.ended(), (0, 3, COMPLETE));
    for (from, to) in from.iter().zip(to) {
        decode.engine.put(to, &prefill.engine.payload(*from));
    }
    assert!(decode.engine.read() == decode.engine.bytes);
    assert_eq!((prefill.statistics().sent_directly, decode.statistics().received_directly), (1, 1));
}
