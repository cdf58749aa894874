//! Hand-offs of tensors in a device's memory, over the double of the driver, whose kernels run in the emulator. Without
//! compilers each test says why it is skipped.

#[allow(dead_code, reason = "of an engine only tensors and streams are used")]
mod engine;

#[path = "device_handoff/ipc.rs"]
mod ipc;

#[path = "../../../dataplane/cuda/tests/double/mod.rs"]
mod double;
#[allow(dead_code, reason = "of the emulator only the library is used")]
#[path = "../../../dataplane/kernels/tests/emulator/harness.rs"]
mod harness;

use std::ffi::{CStr, CString, c_char, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use dataplane_cuda::{Cuda, Device, DeviceMemory, DeviceSlab};
use dataplane_gpu::LayoutKernels;
use dataplane_memory::SlabLayout;
use dataplane_verbs::testing::{Accelerator, Reach, SoftwareDevice};
use double::Double;
use engine::{Engine, EngineStream, Rig};
use harness::{Random, seed};
use kvasir_kv::{Ending, HandOff, HandOffStatistics, Status};

const PATIENCE: Duration = Duration::from_secs(30);
const LAYERS: u32 = 5;
/// Bytes of a block in one plane; a layer has two planes.
const PIECE: usize = 1200;
const BLOCKS: usize = 80;

fn device() -> Option<(Double, Arc<Device>, String)> {
    let double = Double::load()?;
    let library = harness::build("libkvasir_emulator.so", &["emulator.cpp"], &["-O2", "-shared", "-fPIC"])?;
    let device = Cuda::open().expect("the double starts").device(0).expect("device");
    Some((double, Arc::new(device), format!("emulator:{}\n", library.display())))
}

/// A software network card that reaches the double's memory by dma-buf, as a card beside a GPU does.
fn card(device: &Arc<Device>, reach: Reach) -> SoftwareDevice {
    // Cards live as long as the process; the device does not.
    struct Memory(Weak<Device>);
    impl Memory {
        fn at(&self, address: u64, bytes: usize) -> Option<DeviceSlab> {
            // SAFETY: the memory of hand-offs is there for as long as a card has work on it, and this is dropped at once.
            unsafe { DeviceSlab::borrow(&*self.0.upgrade()?, address, bytes) }.ok()
        }
    }
    impl Accelerator for Memory {
        fn covers(&self, address: u64, length: u64) -> bool {
            self.at(address, length as usize).is_some()
        }
        fn read(&self, address: u64, bytes: &mut [u8]) {
            self.at(address, bytes.len()).expect("covered").read(0, bytes).expect("a live device");
        }
        fn write(&self, address: u64, bytes: &[u8]) {
            self.at(address, bytes.len()).expect("covered").write(0, bytes).expect("a live device");
        }
    }
    let card = SoftwareDevice::new();
    card.put_accelerator_beside(Arc::new(Memory(Arc::downgrade(device))), reach);
    card
}

fn transfer_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed) << 20 | u64::from(std::process::id())
}

const DMA_BUF: Reach = Reach { dma_buf: true, peer_memory: false };
const ON_DEVICE: &str = "[device]\nstaging = \"1 MiB\"\nhandoff_capacity = \"1 MiB\"\n";

fn configuration(transport: &str, device: &str, more: &str) -> String {
    format!(
        "[store]\nslot = \"16 KiB\"\n[host_tier]\ncapacity = \"1 MiB\"\n{device}[transfer]\ntransport = {transport:?}\n\
         layers = {LAYERS}\nrows = 2\nhead_bytes = \"{PIECE} B\"\n{more}"
    )
}

/// Keys and values of each layer, with different strides.
fn on_device(device: &Device, random: &mut Random) -> Engine {
    let strides = [PIECE + 80, PIECE].map(|stride| (stride, PIECE));
    let shapes: Vec<(usize, usize)> = (0..LAYERS).flat_map(|_| strides).collect();
    Engine::new(device, random, &shapes, BLOCKS)
}

/// A store with an engine's tensors.
struct Side {
    // Closed before the tensors are dropped.
    rig: Rig,
    tensors: u64,
    engine: Engine,
}

impl Side {
    fn new(device: &Device, image: &str, random: &mut Random, transport: &str, more: &str) -> Self {
        Self::over(device, image, random, &configuration(transport, ON_DEVICE, more))
    }

    /// A store with RDMA over a card that reaches device memory, bypassing host memory.
    fn direct(device: &Arc<Device>, image: &str, random: &mut Random, more: &str) -> Self {
        Self::over(device, image, random, &direct(&card(device, DMA_BUF), more))
    }

    fn over(device: &Device, image: &str, random: &mut Random, configuration: &str) -> Self {
        let rig = Rig::new(open(image, configuration).expect("opens"));
        let engine = on_device(device, random);
        Self { tensors: rig.register(&engine), rig, engine }
    }

    fn on_host(random: &mut Random, transport: &str, more: &str) -> Self {
        Self::on_host_with(random, &configuration(transport, "", more), PIECE)
    }

    /// As [`Self::on_host`], with pieces of `piece` bytes in each plane.
    fn on_host_with(random: &mut Random, configuration: &str, piece: usize) -> Self {
        let library = Some(SoftwareDevice::library());
        let open = kvasir_kv::testing::open(configuration, |_| unreachable!("no device"), library);
        let rig = Rig::new(open.expect("opens"));
        let engine = Engine::on_host(random, &[(piece, piece); 2 * LAYERS as usize], BLOCKS);
        Self { tensors: rig.register(&engine), rig, engine }
    }

    fn address(&self) -> String {
        let mut text = [0 as c_char; 600];
        // SAFETY: the array is as long as is said.
        let status = unsafe {
            kvasir_kv::kvasir_kv_handoff_address(
                self.rig.0,
                text.as_mut_ptr(),
                text.len(),
                std::ptr::null_mut(),
            )
        };
        assert_eq!(status, 0);
        // SAFETY: the library has written an end.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().expect("UTF-8");
        text.lines().next().expect("a way").to_owned()
    }

    fn submit(&self, handoff: HandOff, transfer: u64, blocks: &[u64]) -> i32 {
        let handoff = HandOff {
            user: transfer,
            content: [7; 16],
            tensors: self.tensors,
            blocks: blocks.as_ptr(),
            count: blocks.len(),
            transfers: &raw const transfer,
            transfer_count: 1,
            ..handoff
        };
        // SAFETY: the arrays live during the call, the tensors until the store is closed.
        unsafe { kvasir_kv::kvasir_kv_submit_handoff(self.rig.0, &raw const handoff) }
    }

    fn push(&self, transfer: u64, first_block: u32, blocks: &[u64], layers: Range<u32>) -> i32 {
        self.push_after(transfer, first_block, blocks, layers, std::ptr::null_mut())
    }

    fn push_after(
        &self,
        transfer: u64,
        first_block: u32,
        blocks: &[u64],
        layers: Range<u32>,
        event: *mut c_void,
    ) -> i32 {
        let (first_layer, layers) = (layers.start, layers.end - layers.start);
        let push = HandOff { operation: 7, first_block, first_layer, layers, event, ..nothing() };
        self.submit(push, transfer, blocks)
    }

    fn expect(&self, transfer: u64, from: &str, first_block: u32, blocks: &[u64]) -> i32 {
        self.expect_after(transfer, from, first_block, blocks, std::ptr::null_mut())
    }

    fn expect_after(
        &self,
        transfer: u64,
        from: &str,
        first_block: u32,
        blocks: &[u64],
        event: *mut c_void,
    ) -> i32 {
        let from = CString::new(from).expect("no zero");
        let addresses = [from.as_ptr()];
        let deadline_ms = PATIENCE.as_millis() as u32;
        let addresses = addresses.as_ptr();
        let expect = HandOff { operation: 8, first_block, deadline_ms, addresses, event, ..nothing() };
        self.submit(expect, transfer, blocks)
    }

    fn end(&self, transfer: u64) {
        assert_eq!(kvasir_kv::kvasir_kv_end_handoff(self.rig.0, transfer), 0);
    }

    /// Returns the status, blocks and ending of the next completion.
    fn ended(&self) -> (i32, u64, u64) {
        let end = self.rig.poll(PATIENCE);
        (end.status, end.payload_bytes, end.meta_bytes)
    }

    fn statistics(&self) -> HandOffStatistics {
        let mut statistics = HandOffStatistics::default();
        // SAFETY: as long as is said.
        let status = unsafe {
            kvasir_kv::kvasir_kv_handoff_stats(
                self.rig.0,
                &raw mut statistics,
                size_of::<HandOffStatistics>(),
            )
        };
        assert_eq!(status, 0);
        statistics
    }

    fn wait_for_rest(&self) {
        let started = Instant::now();
        while self.statistics().slots_used > 0 {
            assert!(started.elapsed() < PATIENCE, "slots that nobody gives back: {:?}", self.statistics());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn nothing() -> HandOff {
    HandOff {
        user: 0,
        operation: 0,
        first_block: 0,
        content: [0; 16],
        tensors: 0,
        blocks: std::ptr::null(),
        count: 0,
        transfers: std::ptr::null(),
        transfer_count: 0,
        addresses: std::ptr::null(),
        first_layer: 0,
        layers: 0,
        deadline_ms: 0,
        bytes: size_of::<HandOff>() as u32,
        event: std::ptr::null_mut(),
    }
}

fn direct(card: &SoftwareDevice, more: &str) -> String {
    let rdma = format!("[rdma]\ndevices = [{:?}]\nconnections_per_device = 2\n", card.name());
    configuration("rdma", &format!("{ON_DEVICE}direct = true\n"), &format!("{more}{rdma}"))
}

fn open(image: &str, configuration: &str) -> Result<*mut kvasir_kv::Handle, String> {
    // SAFETY: the emulator is compiled from the kernels' own text.
    let kernels = |device: &Device| unsafe { LayoutKernels::load(device, image.as_bytes()) };
    kvasir_kv::testing::open(configuration, kernels, Some(SoftwareDevice::library()))
}

/// The numbers below `count` in any order.
fn shuffled(random: &mut Random, count: usize) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..count as u64).collect();
    for left in (1..count).rev() {
        numbers.swap(left, random.below(left as u64 + 1) as usize);
    }
    numbers
}

const COMPLETE: u64 = Ending::Complete as u64;
const HAND_OFFS: u64 = 8;

#[test]
fn random_blocks_arrive_layer_by_layer_over_each_transport() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(701));
    for transport in ["shm", "tcp", "rdma, directly"] {
        let side = |random: &mut Random| match transport {
            "rdma, directly" => Side::direct(&device, &image, random, ""),
            _ => Side::new(&device, &image, random, transport, ""),
        };
        let (prefill, mut decode) = (side(random), side(random));
        let mut sent = 0;
        for _ in 0..HAND_OFFS {
            let transfer = transfer_id();
            let count = 1 + random.below(BLOCKS as u64) as usize;
            let known = random.below(count as u64) as usize;
            let (from, to) = (shuffled(random, BLOCKS), shuffled(random, BLOCKS));
            let (from, to) = (&from[..count], &to[known..count]);
            let is_early = random.below(2) == 0;
            if is_early {
                assert_eq!(decode.expect(transfer, &prefill.address(), known as u32, to), 0);
            }
            // Chunks of the prompt, each layer by layer or as a whole.
            let mut pushes = 0;
            let mut first = 0;
            while first < count {
                let chunk = 1 + random.below((count - first) as u64) as usize;
                let step = random.one_of(&[1, 2, LAYERS]);
                for layer in (0..LAYERS).step_by(step as usize) {
                    let layers = layer..(layer + step).min(LAYERS);
                    assert_eq!(prefill.push(transfer, first as u32, &from[first..first + chunk], layers), 0);
                    pushes += 1;
                }
                first += chunk;
            }
            prefill.end(transfer);
            if !is_early {
                assert_eq!(decode.expect(transfer, &prefill.address(), known as u32, to), 0);
            }
            assert_eq!(decode.ended(), (0, to.len() as u64, COMPLETE), "{transport}");
            for _ in 0..pushes {
                assert_eq!(prefill.ended().0, 0);
            }
            for (from, to) in from[known..].iter().zip(to) {
                decode.engine.put(*to, &prefill.engine.payload(*from));
            }
            sent += to.len();
            assert!(decode.engine.read() == decode.engine.bytes, "these blocks and no others: {transport}");
            prefill.wait_for_rest();
            decode.wait_for_rest();
        }
        assert!(prefill.engine.read() == prefill.engine.bytes, "the sender is as before");
        assert_eq!(prefill.statistics().bytes_sent, (sent * 2 * LAYERS as usize * PIECE) as u64);
        let (sender, receiver) = (prefill.statistics(), decode.statistics());
        assert_eq!(receiver.blocks_received, sent as u64);
        let [directly, staged] = if transport.starts_with("rdma") { [HAND_OFFS, 0] } else { [0, HAND_OFFS] };
        assert_eq!((sender.sent_directly, sender.sent_staged), (directly, staged), "{transport}");
        assert_eq!((receiver.received_directly, receiver.received_staged), (directly, staged), "{transport}");
    }
}

/// Random actions on both sides: cancelled, declined, late, on a device with delays. Blocks that arrive are
/// right, the rest of the tensors is unchanged, and no resource stays in use.
#[test]
fn random_hand_offs_are_right_or_missing() {
    let Some((double, device, image)) = device() else { return };
    let random = &mut Random(seed(709));
    let (mut whole, mut missing) = (0, 0);
    for is_direct in [false, true] {
        let side = |random: &mut Random| {
            let lease = "lease = \"2 s\"\n";
            if is_direct {
                Side::direct(&device, &image, random, lease)
            } else {
                Side::new(&device, &image, random, "shm", lease)
            }
        };
        let (prefill, mut decode) = (side(random), side(random));
        for _ in 0..30 {
            let transfer = transfer_id();
            let count = 1 + random.below(12) as usize;
            let first = random.below(count as u64) as usize;
            let (from, to) = (shuffled(random, BLOCKS), shuffled(random, BLOCKS));
            let (from, to) = (&from[..count], &to[first..count]);
            let (fault, step) = (random.below(6), random.below(LAYERS.into()) as u32);
            let (is_late, is_declined) = (random.below(2) == 0, fault == 3);
            double.set("delay_us", random.one_of(&[0, 0, 50, 400]));
            let address = prefill.address();
            if is_declined {
                let address = CString::new(address.as_str()).expect("no zero");
                // SAFETY: the address lives during the call.
                let told =
                    unsafe { kvasir_kv::kvasir_kv_decline_handoff(decode.rig.0, transfer, address.as_ptr()) };
                assert_eq!(told, 0);
            } else if !is_late {
                assert_eq!(decode.expect(transfer, &address, first as u32, to), 0);
            }
            for layer in 0..LAYERS {
                assert_eq!(prefill.push(transfer, 0, from, layer..layer + 1), 0);
                let victim = match fault {
                    1 if layer == step => Some(&prefill),
                    2 if layer == step && !is_late => Some(&decode),
                    _ => None,
                };
                if let Some(victim) = victim {
                    std::thread::sleep(Duration::from_micros(random.below(2000)));
                    assert_eq!(kvasir_kv::kvasir_kv_cancel_handoff(victim.rig.0, transfer), 0);
                }
            }
            if is_late && !is_declined {
                assert_eq!(decode.expect(transfer, &address, first as u32, to), 0);
            }
            prefill.end(transfer);
            let (status, arrived, _) = if is_declined { (Status::Miss as i32, 0, 0) } else { decode.ended() };
            for _ in 0..LAYERS {
                prefill.ended();
            }
            assert_eq!(status == 0, arrived as usize == to.len());
            for (from, to) in from[first..].iter().zip(&to[..arrived as usize]) {
                decode.engine.put(*to, &prefill.engine.payload(*from));
            }
            assert!(decode.engine.read() == decode.engine.bytes, "fault {fault}, late {is_late}");
            if status == 0 { whole += 1 } else { missing += 1 }
        }
        double.set("delay_us", 0);
        prefill.wait_for_rest();
        decode.wait_for_rest();
        assert_eq!(decode.statistics().checksum_failures, 0);
    }
    println!("{whole} whole, {missing} not");
    assert!(whole > 20 && missing > 8, "{whole} whole, {missing} not");
}

#[test]
fn a_device_and_a_processor_hand_over_to_each_other() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(702));
    for (from_host, is_direct) in [(false, false), (true, false), (false, true), (true, true)] {
        let (on_device, on_host) = if is_direct {
            let rdma = format!("[rdma]\ndevices = [{:?}]\n", SoftwareDevice::new().name());
            (Side::direct(&device, &image, random, ""), Side::on_host(random, "rdma", &rdma))
        } else {
            (Side::new(&device, &image, random, "shm", ""), Side::on_host(random, "shm", ""))
        };
        let (prefill, mut decode) = if from_host { (on_host, on_device) } else { (on_device, on_host) };
        let (transfer, from, to) = (transfer_id(), [9, 3, 60], [40, 41, 2]);
        assert_eq!(prefill.push(transfer, 0, &from, 0..LAYERS), 0);
        prefill.end(transfer);
        assert_eq!(decode.expect(transfer, &prefill.address(), 0, &to), 0);
        assert_eq!(decode.ended(), (0, 3, COMPLETE));
        for (from, to) in from.iter().zip(to) {
            let wanted = prefill.engine.payload(*from);
            // Tensors in host memory are the engine's own: their bytes are where they were registered.
            if from_host {
                decode.engine.put(to, &wanted);
            } else {
                assert!(host_block(&decode.engine, to) == wanted);
            }
        }
        if from_host {
            assert!(decode.engine.read() == decode.engine.bytes);
            assert_eq!(decode.statistics().received_directly, u64::from(is_direct));
        } else {
            assert_eq!(prefill.statistics().sent_directly, u64::from(is_direct));
        }
    }
}

/// One process has both heads of a model, the other has one. Devices compute checksums of one contiguous piece,
/// so transfers of such a process are staged through host memory.
#[test]
fn blocks_between_processes_with_other_heads_are_staged() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(708));
    // Half of a piece for each head of a row, and half of a piece in each plane.
    let whole = |card: &SoftwareDevice| {
        direct(card, "").replace("head_bytes = \"1200 B\"", "heads = 2\nhead_bytes = \"600 B\"")
    };
    let half = |more: &str| configuration("rdma", "", more).replace("\"1200 B\"", "\"600 B\"");
    let rdma = format!("[rdma]\ndevices = [{:?}]\n", SoftwareDevice::new().name());
    let mut both = Side::over(&device, &image, random, &whole(&card(&device, DMA_BUF)));
    let one = Side::on_host_with(random, &half(&rdma), PIECE / 2);
    let (sent, received) = (transfer_id(), transfer_id());
    assert_eq!(both.push(sent, 0, &[9, 3], 0..LAYERS), 0);
    both.end(sent);
    assert_eq!(one.expect(sent, &both.address(), 0, &[1, 2]), 0);
    assert_eq!(one.ended(), (0, 2, COMPLETE));
    assert_eq!((both.statistics().sent_directly, both.statistics().sent_staged), (0, 1));
    for (from, to) in [(9, 1), (3, 2)] {
        // A layer is laid out in rows of heads; the first half of each row is head 0.
        let wanted: Vec<u8> =
            both.engine.payload(from).chunks(PIECE).flat_map(|row| row[..PIECE / 2].to_vec()).collect();
        assert!(host_block(&one.engine, to) == wanted);
    }
    assert_eq!(both.ended().0, 0);
    assert_eq!(one.push(received, 0, &[1], 0..LAYERS), 0);
    one.end(received);
    assert_eq!(both.expect(received, &one.address(), 0, &[5]), 0);
    assert_eq!(both.ended(), (0, 1, COMPLETE));
    assert_eq!((both.statistics().received_directly, both.statistics().received_staged), (0, 1));
    // The other head of each row is what the staging slot held before: no process sent it.
    let (mut wanted, found) = (both.engine.payload(5), both.engine.payload_now(5));
    for (row, sent) in wanted.chunks_mut(PIECE).zip(host_block(&one.engine, 1).chunks(PIECE / 2)) {
        row[..PIECE / 2].copy_from_slice(sent);
    }
    let first_heads =
        |block: &[u8]| -> Vec<u8> { block.chunks(PIECE).flat_map(|row| row[..PIECE / 2].to_vec()).collect() };
    assert!(first_heads(&found) == first_heads(&wanted));
    both.wait_for_rest();
    one.wait_for_rest();
}

/// An engine with direct hand-offs and four others at the same time, each reached as it can be: a device over a card directly,
/// a processor over TCP and over shared memory, and a device that is staged over TCP; both ways.
#[test]
fn direct_and_staged_hand_offs_of_one_engine_go_side_by_side() {
    let Some((_double, device, image)) = device() else { return };
    let (device, image, random) = (&device, &*image, &mut Random(seed(710)));
    let direct = |random: &mut Random| {
        let rdma = format!("[rdma]\ndevices = [{:?}]\n", card(device, DMA_BUF).name());
        let text = configuration("auto", &format!("{ON_DEVICE}direct = true\n"), &rdma);
        Side::over(device, image, random, &text)
    };
    let mut hub = direct(random);
    let mut others = [
        ("card", direct(random)),
        ("processor over TCP", Side::on_host(random, "tcp", "")),
        ("processor over shared memory", Side::on_host(random, "shm", "")),
        ("staged device over TCP", Side::new(device, image, random, "tcp", "")),
    ];
    for round in 0..4 {
        let mut expected = Vec::new();
        for (at, (_, other)) in others.iter().enumerate() {
            let ((sent, received), first) = ((transfer_id(), transfer_id()), 3 * at as u64);
            let (from, to) = ([first, first + 1, first + 2], [first + 20, first + 22, first + 21]);
            assert_eq!(other.expect(sent, &hub.address(), 0, &to), 0);
            assert_eq!(hub.expect(received, &other.address(), 0, &to), 0);
            for (side, transfer) in [(&hub, sent), (other, received)] {
                for layer in 0..LAYERS {
                    assert_eq!(side.push(transfer, 0, &from, layer..layer + 1), 0);
                }
                side.end(transfer);
            }
            expected.push((received, from, to));
        }
        let mut arrived = 0;
        while arrived < others.len() {
            let end = hub.rig.poll(PATIENCE);
            let Some(at) = expected.iter().position(|(received, ..)| *received == end.user) else { continue };
            let name = others[at].0;
            let is_whole = end.meta_bytes == COMPLETE && end.payload_bytes == 3;
            assert!(is_whole, "round {round}, {name}: {} {}", end.status, end.meta_bytes);
            arrived += 1;
            let (_, from, to) = &expected[at];
            for (from, to) in from.iter().zip(to) {
                hub.engine.put(*to, &others[at].1.engine.payload(*from));
            }
            expected[at].0 = 0;
        }
        for (at, (name, other)) in others.iter_mut().enumerate() {
            let (_, from, to) = expected[at];
            let mut has_arrived = false;
            for _ in 0..=LAYERS {
                let end = other.rig.poll(PATIENCE);
                has_arrived |= end.payload_bytes == 3 && end.meta_bytes == COMPLETE;
                assert_eq!(end.status, 0, "{name}");
            }
            assert!(has_arrived, "{name}");
            for (from, to) in from.iter().zip(to) {
                let found = match name.starts_with("processor") {
                    true => host_block(&other.engine, to),
                    false => other.engine.payload_now(to),
                };
                assert!(found == hub.engine.payload(*from), "round {round}, {name}");
                other.engine.put(to, &found);
            }
        }
        assert!(hub.engine.read() == hub.engine.bytes, "round {round}");
        hub.wait_for_rest();
    }
    let all = hub.statistics();
    assert_eq!((all.sent_directly, all.sent_staged), (4, 12));
    assert_eq!((all.received_directly, all.received_staged), (4, 12));
    assert_eq!(all.checksum_failures, 0);
}

#[test]
fn a_card_that_does_not_reach_the_device_is_an_error() {
    let Some((_double, device, image)) = device() else { return };
    let refused = open(&image, &direct(&card(&device, Reach::default()), "")).expect_err("out of reach");
    assert!(
        refused.contains("device.direct = true: ") && refused.contains("bytes of device memory"),
        "{refused}"
    );
    for kind in ["shm", "tcp"] {
        let local = direct(&card(&device, DMA_BUF), "").replace("\"rdma\"", &format!("{kind:?}"));
        let refused = open(&image, &local).expect_err("a transport that does not reach the device's memory");
        let text = "device.direct = true takes transfer.transport = \"auto\", \"rdma\" or \"cuda_ipc\"";
        assert!(refused.contains(text), "{refused}");
    }
    for (configuration, text) in [
        ("[device]\ndirect = true\n", "device.direct = true needs a section [transfer]"),
        (
            "[device]\nhandoff_capacity = \"1 MiB\"\n[transfer]\nhead_bytes = \"2 MiB\"\n",
            "device.handoff_capacity = \"1 MiB\" has room for 0 blocks of 2097152 bytes",
        ),
    ] {
        let refused = open(&image, configuration).expect_err(text);
        assert!(refused.contains(text), "{refused}");
    }
}

/// A block of tensors in host memory, as it is.
fn host_block(engine: &Engine, block: u64) -> Vec<u8> {
    let piece = |plane: &kvasir_kv::Plane| {
        let start = plane.start.cast::<u8>().wrapping_add((block * plane.block_stride) as usize);
        // SAFETY: a block of the engine's own memory, which is not written to.
        unsafe { std::slice::from_raw_parts(start, plane.block_bytes as usize) }.to_vec()
    };
    engine.planes.iter().flat_map(piece).collect()
}

/// Pushes wait for staging slots. An expectation of more blocks than half of them is refused, as is any for
/// which the device has no slots; the other side is told.
#[test]
fn less_memory_than_blocks_is_waited_for_or_refused() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(703));
    // Number of staging slots, half of them for receiving.
    let capacity =
        |slots: usize| format!("capacity = \"{} B\"\n", slots * (2 * LAYERS as usize * PIECE + 32));
    let prefill = Side::new(&device, &image, random, "shm", &capacity(4));
    let mut decode = Side::new(&device, &image, random, "shm", &capacity(40));
    let transfer = transfer_id();
    let (from, to) = (shuffled(random, BLOCKS), shuffled(random, BLOCKS));
    let (from, to) = (&from[..20], &to[..20]);
    for layer in 0..LAYERS {
        assert_eq!(prefill.push(transfer, 0, from, layer..layer + 1), 0);
    }
    prefill.end(transfer);
    assert_eq!(decode.expect(transfer, &prefill.address(), 0, to), 0);
    assert_eq!(decode.ended(), (0, 20, COMPLETE));
    for (from, to) in from.iter().zip(to) {
        decode.engine.put(*to, &prefill.engine.payload(*from));
    }
    assert!(decode.engine.read() == decode.engine.bytes);
    (0..LAYERS).for_each(|_| assert_eq!(prefill.ended().0, 0));

    let refused = transfer_id();
    let blocks: Vec<u64> = (0..21).collect();
    assert_eq!(decode.expect(refused, &prefill.address(), 0, &blocks), 0);
    assert_eq!(decode.ended(), (Status::Miss as i32, 0, Ending::Refused as u64), "21 of 20 staging slots");
    let slots = prefill.statistics().slots as usize;
    let (many, pushed) = (transfer_id(), transfer_id());
    let blocks: Vec<u64> = (0..=slots as u64).map(|at| at % BLOCKS as u64).collect();
    assert_eq!(decode.expect(many, &prefill.address(), 0, &blocks), 0);
    assert_eq!(decode.ended(), (Status::Throttled as i32, 0, Ending::Refused as u64), "{slots} slots");
    assert_eq!(decode.expect(pushed, &prefill.address(), 0, &[0]), 0);
    assert_eq!(prefill.push(pushed, 0, &blocks, 0..LAYERS), 0);
    assert_eq!(prefill.ended().0, Status::Throttled as i32);
    assert_eq!(decode.ended(), (Status::Miss as i32, 0, Ending::SenderStopped as u64));
    prefill.end(pushed);
    prefill.wait_for_rest();
    decode.wait_for_rest();
}

/// A push reads, and an arrival writes, only after the engine's own work on the blocks has ended.
#[test]
fn the_engines_work_before_the_event_is_over_when_blocks_are_used() {
    let Some((double, device, image)) = device() else { return };
    let random = &mut Random(seed(704));
    let (prefill, decode) =
        (Side::new(&device, &image, random, "shm", ""), Side::new(&device, &image, random, "shm", ""));
    let whole = prefill.engine.bytes.len();
    let memory = || {
        let layout = SlabLayout { slot_bytes: whole, slot_count: 1 };
        DeviceSlab::allocate(&device, layout).expect("memory")
    };
    let [zeros, results, scratch, seen] = [(); 4].map(|()| memory());
    zeros.fill(0).expect("fill");
    results.fill(0x5A).expect("fill");
    let before = decode.engine.read();
    let streams = [EngineStream::new(&device), EngineStream::new(&device)];
    double.set("delay_us", 5_000);
    let (source, target) = (prefill.engine.address(), decode.engine.address());
    (0..60).for_each(|_| streams[0].copy(zeros.address(), source, whole));
    streams[0].copy(results.address(), source, whole);
    (0..60).for_each(|_| streams[1].copy(target, scratch.address(), whole));
    streams[1].copy(target, seen.address(), whole);
    let events = streams.each_ref().map(EngineStream::record);
    let transfer = transfer_id();
    assert_eq!(prefill.push_after(transfer, 0, &[2], 0..LAYERS, events[0]), 0);
    prefill.end(transfer);
    assert_eq!(decode.expect_after(transfer, &prefill.address(), 0, &[5], events[1]), 0);
    assert_eq!(decode.ended(), (0, 1, COMPLETE));
    assert_eq!(prefill.ended().0, 0);
    double.set("delay_us", 0);
    for (stream, event) in streams.iter().zip(events) {
        stream.destroy(event);
    }
    drop(streams);
    let mut found = vec![0; whole];
    seen.read(0, &mut found).expect("read");
    assert!(found == before, "the engine read what was there before the hand-off");
    let mut engine = decode.engine;
    assert!(engine.payload_now(5).iter().all(|&byte| byte == 0x5A), "what the engine computed last");
    drop(decode.rig);
}

#[test]
fn a_lost_device_fails_hand_offs_and_tells_the_receiver() {
    let Some((double, device, image)) = device() else { return };
    let random = &mut Random(seed(705));
    let (prefill, decode) = (Side::new(&device, &image, random, "shm", ""), Side::on_host(random, "shm", ""));
    let transfer = transfer_id();
    assert_eq!(decode.expect(transfer, &prefill.address(), 0, &[0, 1]), 0);
    assert_eq!(prefill.push(transfer, 0, &[4, 5], 0..1), 0);
    assert_eq!(prefill.ended(), (0, 2, COMPLETE));
    double.set("fault_launch", 1);
    assert_eq!(prefill.push(transfer, 0, &[4, 5], 1..2), 0);
    assert_eq!(prefill.ended().0, Status::Failed as i32);
    assert!(prefill.rig.last_error().contains("CUDA_ERROR"), "{}", prefill.rig.last_error());
    prefill.end(transfer);
    assert_eq!(decode.ended(), (Status::Miss as i32, 0, Ending::SenderStopped as u64));
    decode.wait_for_rest();
}

#[test]
fn tensors_of_another_memory_or_cut_are_refused() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(706));
    let mut side = Side::new(&device, &image, random, "shm", "");
    let refused = |side: &Side, text: &str| {
        assert_eq!(side.push(1, 0, &[0], 0..1), Status::InvalidArgument as i32);
        assert!(side.rig.last_error().contains(text), "{}", side.rig.last_error());
    };
    let host = Engine::on_host(random, &[(PIECE, PIECE); 2 * LAYERS as usize], 4);
    side.tensors = side.rig.register(&host);
    refused(
        &side,
        "the tensors lie in host memory, and hand-offs are of tensors in memory of CUDA device 0 (section [device]",
    );
    // Fine for saves and loads.
    let other = Engine::new(&device, random, &[(PIECE, PIECE); 3], 4);
    side.tensors = side.rig.register(&other);
    refused(&side, "the tensors have 3 planes, and a block 5 layers");
    assert_eq!(side.rig.save(side.tensors, &[engine::name(1, 0)], &[0]), (0, 1));
    let mut on_host = Side::on_host(random, "shm", "");
    let event = std::ptr::dangling_mut();
    assert_eq!(on_host.push_after(1, 0, &[0], 0..1, event), Status::InvalidArgument as i32);
    assert!(on_host.rig.last_error().contains("event is not null"), "{}", on_host.rig.last_error());
    on_host.tensors = 0;
    refused(&on_host, "tensors 0 are not registered");
}

#[test]
fn who_closes_waits_for_the_device() {
    let Some((double, device, image)) = device() else { return };
    let random = &mut Random(seed(707));
    let side = Side::new(&device, &image, random, "shm", "");
    let blocks: Vec<u64> = (0..20).collect();
    double.set("delay_us", 5_000);
    let launches = double.get("launches");
    for layer in 0..LAYERS {
        assert_eq!(side.push(1, 0, &blocks, layer..layer + 1), 0);
    }
    while double.get("launches") == launches {
        std::thread::yield_now();
    }
    // Work in progress ends, and queued work is dropped: the double ends the process if a kernel reads freed memory.
    drop(side.rig);
    drop(side.engine);
    double.set("delay_us", 0);
}
