//! Hand-offs between two stores of this process, through the functions that C calls: blocks arrive intact or
//! not at all, and incomplete hand-offs leave no resource in use.

use std::ffi::{CStr, CString, c_char};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvasir_kv::{
    Completion, Ending, HandOff, HandOffStatistics, Handle, Plane, RAIL_NAME_BYTES, RailStatistics,
    StageStatistics, Status, Tensors, kvasir_kv_cancel_handoff, kvasir_kv_close, kvasir_kv_decline_handoff,
    kvasir_kv_end_handoff, kvasir_kv_handoff_address, kvasir_kv_handoff_rails, kvasir_kv_handoff_stages,
    kvasir_kv_handoff_stats, kvasir_kv_last_error, kvasir_kv_open, kvasir_kv_poll, kvasir_kv_register,
    kvasir_kv_submit_handoff, kvasir_kv_unregister,
};

const PATIENCE: Duration = Duration::from_secs(20);
const PUSH: u32 = 7;
const EXPECT: u32 = 8;
const LAYERS: usize = 6;
/// Bytes of a block in one plane; a layer has two planes.
const PIECE: usize = 1200;
const STRIDE: usize = 1280;
const BLOCKS: usize = 64;
const CONTENT: [u8; 16] = [7; 16];

/// A store with an engine's tensors.
struct Engine {
    handle: *mut Handle,
    tensors: u64,
    planes: Vec<Vec<u8>>,
    piece: usize,
}

fn transfer_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed) << 20 | u64::from(std::process::id())
}

fn last_error() -> String {
    let mut text = [0 as c_char; 500];
    // SAFETY: the array is as long as is said.
    unsafe { kvasir_kv_last_error(text.as_mut_ptr(), text.len()) };
    // SAFETY: the library has written an end.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}

impl Engine {
    fn new(transport: &str, seed: u8, more: &str) -> Self {
        Self::with(transport, seed, &format!("rows = 2\nhead_bytes = \"{PIECE} B\"\n{more}"), PIECE)
    }

    /// An engine with pieces of `piece` bytes in each plane.
    fn with(transport: &str, seed: u8, more: &str, piece: usize) -> Self {
        let configuration = format!(
            "[store]\nslot = \"16 KiB\"\n[host_tier]\ncapacity = \"1 MiB\"\n[transfer]\ntransport = {transport:?}\n\
             layers = {LAYERS}\n{more}"
        );
        let configuration = CString::new(configuration).expect("no zero");
        let (mut handle, mut error) = (std::ptr::null_mut(), [0 as c_char; 300]);
        // SAFETY: all of it lives during the call.
        let status = unsafe {
            kvasir_kv_open(configuration.as_ptr(), &raw mut handle, error.as_mut_ptr(), error.len())
        };
        // SAFETY: the library has written an end.
        assert_eq!(status, 0, "{:?}", unsafe { CStr::from_ptr(error.as_ptr()) });
        let byte = |plane: usize, at: usize| (at.wrapping_mul(31) ^ (at >> 8) ^ (plane * 7)) as u8 ^ seed;
        let plane = |plane| (0..BLOCKS * STRIDE).map(|at| byte(plane, at)).collect();
        let mut planes: Vec<Vec<u8>> = (0..2 * LAYERS).map(plane).collect();
        let described: Vec<Plane> = planes
            .iter_mut()
            .map(|plane| Plane {
                start: plane.as_mut_ptr().cast(),
                block_stride: STRIDE as u64,
                block_bytes: piece as u64,
            })
            .collect();
        let tensors = Tensors {
            memory: 0,
            device: 0,
            blocks: BLOCKS as u64,
            planes: described.as_ptr(),
            plane_count: described.len(),
        };
        let mut id = 0;
        // SAFETY: the planes live as long as the engine, whose drop closes the store.
        assert_eq!(unsafe { kvasir_kv_register(handle, &raw const tensors, &raw mut id) }, 0);
        Self { handle, tensors: id, planes, piece }
    }

    fn address(&self) -> String {
        let mut text = [0 as c_char; 300];
        // SAFETY: the array is as long as is said.
        let status = unsafe {
            kvasir_kv_handoff_address(self.handle, text.as_mut_ptr(), text.len(), std::ptr::null_mut())
        };
        assert_eq!(status, 0);
        // SAFETY: the library has written an end.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().expect("UTF-8");
        text.lines().next().expect("a way").to_owned()
    }

    fn submit(&self, handoff: &HandOff) -> i32 {
        // SAFETY: the arrays live during the call, the planes until the store is closed.
        unsafe { kvasir_kv_submit_handoff(self.handle, handoff) }
    }

    fn push(&self, transfer: u64, first_block: u32, blocks: &[u64], layers: std::ops::Range<u32>) -> i32 {
        self.push_to(&[transfer], first_block, blocks, layers)
    }

    fn push_to(
        &self,
        transfers: &[u64],
        first_block: u32,
        blocks: &[u64],
        layers: std::ops::Range<u32>,
    ) -> i32 {
        self.submit(&HandOff {
            operation: PUSH,
            first_block,
            first_layer: layers.start,
            layers: layers.end - layers.start,
            ..self.handoff(transfers, blocks)
        })
    }

    fn expect(&self, transfer: u64, address: &str, first_block: u32, blocks: &[u64], wait: Duration) -> i32 {
        self.expect_of(&[transfer], &[address], first_block, blocks, wait)
    }

    fn expect_of(
        &self,
        transfers: &[u64],
        addresses: &[&str],
        first_block: u32,
        blocks: &[u64],
        wait: Duration,
    ) -> i32 {
        let texts: Vec<CString> =
            addresses.iter().map(|&address| CString::new(address).expect("no zero")).collect();
        let addresses: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        self.submit(&HandOff {
            operation: EXPECT,
            first_block,
            deadline_ms: wait.as_millis() as u32,
            addresses: addresses.as_ptr(),
            ..self.handoff(transfers, blocks)
        })
    }

    /// The arrays must outlive the returned value.
    fn handoff(&self, transfers: &[u64], blocks: &[u64]) -> HandOff {
        HandOff {
            user: transfers[0],
            operation: 0,
            first_block: 0,
            content: CONTENT,
            tensors: self.tensors,
            blocks: blocks.as_ptr(),
            count: blocks.len(),
            transfers: transfers.as_ptr(),
            transfer_count: transfers.len(),
            addresses: std::ptr::null(),
            first_layer: 0,
            layers: 0,
            deadline_ms: 0,
            bytes: size_of::<HandOff>() as u32,
            event: std::ptr::null_mut(),
        }
    }

    fn end(&self, transfer: u64) {
        assert_eq!(kvasir_kv_end_handoff(self.handle, transfer), 0);
    }

    fn poll(&self) -> Option<Completion> {
        let mut completion = Completion { user: 0, status: 0, reserved: 0, meta_bytes: 0, payload_bytes: 0 };
        let mut count = 0;
        // SAFETY: room for one.
        let status = unsafe {
            kvasir_kv_poll(self.handle, &raw mut completion, 1, PATIENCE.as_millis() as i32, &raw mut count)
        };
        assert_eq!(status, 0);
        (count == 1).then_some(completion)
    }

    /// Returns the status, blocks and ending of the next completion.
    fn ended(&self) -> (Status, u64, Ending) {
        let completion = self.poll().expect("a completion in time");
        let status = Status::ALL.into_iter().find(|&status| status as i32 == completion.status);
        let endings = [
            Ending::Complete,
            Ending::Corrupted,
            Ending::SenderStopped,
            Ending::PeerDown,
            Ending::Deadline,
            Ending::Refused,
            Ending::Cancelled,
        ];
        let ending = endings.into_iter().find(|&ending| ending as u64 == completion.meta_bytes);
        (status.expect("a status"), completion.payload_bytes, ending.expect("an ending"))
    }

    fn statistics(&self) -> HandOffStatistics {
        let mut statistics = HandOffStatistics::default();
        // SAFETY: as long as is said.
        let status = unsafe {
            kvasir_kv_handoff_stats(self.handle, &raw mut statistics, size_of::<HandOffStatistics>())
        };
        assert_eq!(status, 0);
        statistics
    }

    /// Returns the names and bytes of the transports, as a caller reads them whose structure has `rail_bytes` bytes.
    fn rails(&self, rail_bytes: usize) -> Vec<(String, u64)> {
        let zero = RailStatistics {
            name: [0; RAIL_NAME_BYTES],
            block_bytes: 0,
            slices_retried: 0,
            links_failed: 0,
            nanoseconds_per_kib: 0,
            is_slow: 0,
        };
        let (mut rails, mut count) = ([zero; 4], 0);
        // SAFETY: `rails` has room for four structures of at most its own size.
        let status = unsafe {
            kvasir_kv_handoff_rails(self.handle, rails.as_mut_ptr(), rail_bytes, rails.len(), &raw mut count)
        };
        assert_eq!(status, 0);
        // SAFETY: each begins at a multiple of what the library was told, and there are fewer than `rails` has room for.
        let at =
            |index: usize| unsafe { rails.as_ptr().wrapping_byte_add(index * rail_bytes).read_unaligned() };
        let name = |rail: &RailStatistics| {
            let name = std::ffi::CStr::from_bytes_until_nul(&rail.name).expect("a final 0");
            name.to_str().expect("UTF-8").to_owned()
        };
        (0..count).map(at).map(|rail| (name(&rail), rail.block_bytes)).collect()
    }

    /// Name, count, sum and how many took at most 67 s, of each stage that had some.
    fn stages(&self) -> Vec<(String, u64, u64, u64)> {
        // SAFETY: plain numbers.
        let mut stages: [StageStatistics; 10] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        let bytes = size_of::<StageStatistics>();
        // SAFETY: room for ten.
        let status = unsafe {
            kvasir_kv_handoff_stages(self.handle, stages.as_mut_ptr(), bytes, stages.len(), &raw mut count)
        };
        assert_eq!((status, count), (0, 7));
        let found = stages[..count].iter().filter(|stage| stage.count > 0).map(|stage| {
            assert!(stage.at_most.is_sorted());
            let name = CStr::from_bytes_until_nul(&stage.name).expect("a final 0").to_str().expect("UTF-8");
            (name.to_owned(), stage.count, stage.sum_us, stage.at_most[22])
        });
        found.collect()
    }

    fn wait_for_rest(&self) {
        let started = Instant::now();
        while self.statistics().slots_used > 0 {
            assert!(started.elapsed() < PATIENCE, "slots that nobody gives back: {:?}", self.statistics());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for these stages and returns all of them. The sender's last one comes after its slots are released.
    fn wait_for_stages(&self, expected: &[&str]) -> Vec<(String, u64, u64, u64)> {
        let started = Instant::now();
        loop {
            let stages = self.stages();
            if stages.iter().map(|(name, ..)| name.as_str()).eq(expected.iter().copied()) {
                return stages;
            }
            assert!(started.elapsed() < PATIENCE, "{stages:?} instead of {expected:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn block(&self, number: u64) -> Vec<&[u8]> {
        self.planes.iter().map(|plane| &plane[number as usize * STRIDE..][..self.piece]).collect()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: nothing of it is used afterwards.
        assert_eq!(kvasir_kv_close(self.handle), 0);
    }
}

#[test]
fn blocks_arrive_layer_by_layer_over_each_transport() {
    for transport in ["shm", "tcp"] {
        let (prefill, decode) = (Engine::new(transport, 1, ""), Engine::new(transport, 2, ""));
        let before: Vec<Vec<u8>> = decode.planes.clone();
        let transfer = transfer_id();
        let (from, to) = ([9, 3, 60, 17, 4_u64], [40, 41, 2_u64]);
        // The first two blocks are already on the receiver's side: they are pushed, and not sent.
        assert_eq!(decode.expect(transfer, &prefill.address(), 2, &to, PATIENCE), 0);
        for (first, count) in [(0, 3), (3, 2)] {
            for layer in 0..LAYERS as u32 {
                let blocks = &from[first..first + count];
                assert_eq!(prefill.push(transfer, first as u32, blocks, layer..layer + 1), 0);
            }
        }
        prefill.end(transfer);
        assert_eq!(decode.ended(), (Status::Ok, 3, Ending::Complete), "{transport}");
        for _ in 0..2 * LAYERS {
            assert_eq!(prefill.ended().0, Status::Ok);
        }
        for (from, to) in from[2..].iter().zip(to) {
            assert_eq!(prefill.block(*from), decode.block(to), "{transport}");
        }
        for untouched in (0..BLOCKS as u64).filter(|block| !to.contains(block)) {
            let range = untouched as usize * STRIDE..(untouched as usize + 1) * STRIDE;
            assert!(
                decode
                    .planes
                    .iter()
                    .zip(&before)
                    .all(|(now, then)| now[range.clone()] == then[range.clone()])
            );
        }
        prefill.wait_for_rest();
        decode.wait_for_rest();
        let sent = prefill.statistics().bytes_sent;
        assert_eq!(sent, (3 * 2 * LAYERS * PIECE) as u64, "only what the receiver lacks");
        let rails = prefill.rails(size_of::<RailStatistics>());
        assert_eq!(rails, [(transport.to_owned(), sent)]);
        let shorter = std::mem::offset_of!(RailStatistics, slices_retried);
        assert_eq!(prefill.rails(shorter), rails, "of an older structure the first fields are written");
        assert_eq!(decode.rails(size_of::<RailStatistics>()), [(transport.to_owned(), 0)]);
        assert_eq!(decode.statistics().blocks_received, 3);
        for (side, expected) in [
            (&prefill, &["write", "sum", "finish"][..]),
            (&decode, &["reserve", "first_part", "verify", "whole"]),
        ] {
            let stages = side.wait_for_stages(expected);
            assert!(stages.iter().all(|(_, count, _, at_most)| count == at_most), "{stages:?}");
        }
        let whole = decode.stages().pop().expect("the last");
        assert!(whole.1 == 1 && (1..PATIENCE.as_micros() as u64).contains(&whole.2), "{whole:?}");
    }
}

#[test]
fn the_sender_may_be_first() {
    let (prefill, decode) = (Engine::new("shm", 1, ""), Engine::new("shm", 2, ""));
    let transfer = transfer_id();
    assert_eq!(prefill.push(transfer, 0, &[5, 6], 0..LAYERS as u32), 0);
    assert_eq!(prefill.ended(), (Status::Ok, 2, Ending::Complete));
    prefill.end(transfer);
    assert_eq!(decode.expect(transfer, &prefill.address(), 0, &[8, 7], PATIENCE), 0);
    assert_eq!(decode.ended(), (Status::Ok, 2, Ending::Complete));
    assert_eq!((prefill.block(5), prefill.block(6)), (decode.block(8), decode.block(7)));
}

#[test]
fn what_does_not_come_is_a_miss_with_its_reason() {
    let (prefill, decode) = (Engine::new("shm", 1, ""), Engine::new("shm", 2, ""));
    let address = prefill.address();
    let short = Duration::from_millis(100);

    let nobody = transfer_id();
    assert_eq!(decode.expect(nobody, &address, 0, &[1], short), 0);
    assert_eq!(decode.ended(), (Status::Miss, 0, Ending::Deadline));

    let stopped = transfer_id();
    assert_eq!(decode.expect(stopped, &address, 0, &[1, 2], PATIENCE), 0);
    assert_eq!(prefill.push(stopped, 0, &[3], 0..LAYERS as u32), 0);
    assert_eq!(prefill.ended().0, Status::Ok);
    prefill.end(stopped);
    assert_eq!(decode.ended(), (Status::Miss, 1, Ending::SenderStopped), "the first block has come");
    assert_eq!(prefill.block(3), decode.block(1));

    // Another content: another prompt with the same transfer number.
    let other = transfer_id();
    assert_eq!(decode.expect(other, &address, 0, &[1], PATIENCE), 0);
    let of_other = [other];
    let mut push = HandOff { operation: PUSH, layers: LAYERS as u32, ..prefill.handoff(&of_other, &[3]) };
    push.content = [8; 16];
    assert_eq!(prefill.submit(&push), 0);
    prefill.end(other);
    assert_eq!(decode.ended(), (Status::Miss, 0, Ending::SenderStopped));
    assert!(matches!(prefill.ended().0, Status::Ok | Status::Miss));

    let gone = transfer_id();
    assert_eq!(decode.expect(gone, "shm:/nowhere/kvasir.sock", 0, &[1], PATIENCE), 0);
    assert_eq!(decode.ended(), (Status::Miss, 0, Ending::PeerDown));

    let cancelled = transfer_id();
    assert_eq!(decode.expect(cancelled, &address, 0, &[1], PATIENCE), 0);
    assert_eq!(kvasir_kv_cancel_handoff(decode.handle, cancelled), 0);
    assert_eq!(decode.ended(), (Status::Miss, 0, Ending::Cancelled));
    assert_eq!(prefill.push(cancelled, 0, &[3], 0..1), 0);
    // Copied, even though no receiver may want it, unless the sender has already been told so.
    assert!(matches!(prefill.ended().0, Status::Ok | Status::Miss));
    prefill.wait_for_rest();
    assert_eq!(prefill.push(cancelled, 0, &[3], 1..2), 0);
    assert_eq!(prefill.ended(), (Status::Miss, 0, Ending::Complete), "the sender has heard of it");
    prefill.end(cancelled);

    let pushed = [transfer_id(), transfer_id()];
    assert_eq!(prefill.push_to(&pushed, 0, &[3], 0..1), 0);
    assert_eq!(prefill.ended().0, Status::Ok);
    assert_eq!(prefill.push_to(&pushed[..1], 0, &[3], 1..2), Status::InvalidArgument as i32);
    assert!(last_error().contains("transfers are not those of the earlier pushes"), "{}", last_error());
    assert_eq!(kvasir_kv_cancel_handoff(prefill.handle, pushed[0]), 0);
    decode.wait_for_rest();
    prefill.wait_for_rest();
}

#[test]
fn a_sender_that_is_declined_stops() {
    let (prefill, decode) = (Engine::new("shm", 1, ""), Engine::new("shm", 2, ""));
    let transfer = transfer_id();
    assert_eq!(prefill.push(transfer, 0, &[1], 0..1), 0);
    assert_eq!(prefill.ended().0, Status::Ok);
    let address = CString::new(prefill.address()).expect("no zero");
    // SAFETY: the address lives during the call.
    assert_eq!(unsafe { kvasir_kv_decline_handoff(decode.handle, transfer, address.as_ptr()) }, 0);
    prefill.wait_for_rest();
    assert_eq!(prefill.push(transfer, 0, &[1], 1..2), 0);
    assert_eq!(prefill.ended(), (Status::Miss, 0, Ending::Complete), "nobody wants it");
    prefill.end(transfer);
    prefill.wait_for_rest();
}

#[test]
fn without_memory_a_transfer_is_given_up_on_both_sides() {
    let few = "capacity = \"60 KiB\"\n";
    let blocks: Vec<u64> = (0..8).collect();
    // A block has 14,400 bytes: four fit.
    for (of_sender, of_receiver) in [(few, ""), ("", few)] {
        let (prefill, decode) = (Engine::new("shm", 1, of_sender), Engine::new("shm", 2, of_receiver));
        let transfer = transfer_id();
        assert_eq!(decode.expect(transfer, &prefill.address(), 0, &blocks, PATIENCE), 0);
        assert_eq!(prefill.push(transfer, 0, &blocks, 0..LAYERS as u32), 0);
        let (status, arrived, ending) = decode.ended();
        if of_receiver.is_empty() {
            assert_eq!((status, arrived, ending), (Status::Miss, 0, Ending::SenderStopped));
            assert_eq!(prefill.ended().0, Status::Throttled);
        } else {
            assert_eq!((status, arrived, ending), (Status::Throttled, 0, Ending::Refused));
            assert!(matches!(prefill.ended().0, Status::Ok | Status::Miss));
        }
        prefill.end(transfer);
        decode.wait_for_rest();
        prefill.wait_for_rest();
        // Slots are free again.
        let next = transfer_id();
        assert_eq!(decode.expect(next, &prefill.address(), 0, &blocks[..4], PATIENCE), 0);
        assert_eq!(prefill.push(next, 0, &blocks[..4], 0..LAYERS as u32), 0);
        prefill.end(next);
        assert_eq!(decode.ended(), (Status::Ok, 4, Ending::Complete));
    }
}

#[test]
fn blocks_are_kept_for_a_lease_and_tensors_go_while_something_is_expected() {
    let prefill = Engine::new("shm", 1, "lease = \"100 ms\"\n");
    let transfer = transfer_id();
    assert_eq!(prefill.push(transfer, 0, &[1, 2], 0..LAYERS as u32), 0);
    assert_eq!(prefill.ended().0, Status::Ok);
    prefill.end(transfer);
    prefill.wait_for_rest();
    assert_eq!(prefill.statistics().leases_expired, 1);

    let decode = Engine::new("shm", 2, "");
    assert_eq!(decode.expect(transfer_id(), &prefill.address(), 0, &[1], Duration::from_secs(600)), 0);
    let started = Instant::now();
    assert_eq!(kvasir_kv_unregister(decode.handle, decode.tensors), 0);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(decode.ended(), (Status::Miss, 0, Ending::Cancelled));
}

#[test]
fn mistakes_are_told_by_their_field() {
    let decode = Engine::new("shm", 2, "");
    let (blocks, transfers) = ([1_u64, BLOCKS as u64], [1_u64, 2, 1]);
    let good =
        HandOff { operation: PUSH, layers: LAYERS as u32, ..decode.handoff(&transfers[..1], &blocks[..1]) };
    let nothing = [std::ptr::null::<c_char>()];
    for (handoff, text) in [
        (HandOff { bytes: 95, ..good }, "bytes is 95, and a kvasir_kv_handoff has at least 96"),
        (HandOff { count: 0, ..good }, "count is not in 1 to 1048576"),
        (HandOff { count: 2, ..good }, "blocks[1] is 64, and the tensors have 64"),
        (HandOff { blocks: std::ptr::null(), ..good }, "blocks is a null pointer"),
        (HandOff { first_block: u32::MAX, ..good }, "first_block and count end above"),
        (HandOff { tensors: 99, ..good }, "tensors 99 are not registered"),
        (HandOff { transfer_count: 0, ..good }, "transfer_count is not in 1 to 64"),
        (HandOff { transfer_count: 65, ..good }, "transfer_count is not in 1 to 64"),
        (HandOff { transfer_count: 3, ..good }, "transfers[2] is the same as one before"),
        (HandOff { transfers: std::ptr::null(), ..good }, "transfers is a null pointer"),
        (HandOff { layers: 0, ..good }, "first_layer = 0 and layers = 0 are not in transfer.layers = 6"),
        (HandOff { first_layer: 1, ..good }, "first_layer = 1 and layers = 6 are not in transfer.layers = 6"),
        (HandOff { deadline_ms: 1, ..good }, "deadline_ms is not zero"),
        (HandOff { addresses: nothing.as_ptr(), ..good }, "addresses is not zero"),
        (HandOff { operation: EXPECT, ..good }, "layers is not zero"),
        (HandOff { operation: EXPECT, layers: 0, count: 65_537, ..good }, "count is not in 1 to 65536"),
        (HandOff { operation: 6, ..good }, "operation 6 is neither"),
        (HandOff { operation: EXPECT, layers: 0, ..good }, "addresses is a null pointer"),
        (
            HandOff { operation: EXPECT, layers: 0, addresses: nothing.as_ptr(), ..good },
            "addresses[0] is a null pointer",
        ),
    ] {
        assert_eq!(decode.submit(&handoff), Status::InvalidArgument as i32, "{text}");
        assert!(last_error().contains(text), "{} instead of {text}", last_error());
    }
    let sender = Engine::new("shm", 1, "");
    let (first, second) = (transfer_id(), transfer_id());
    let address = sender.address();
    assert_eq!(decode.expect_of(&[first, second], &[&address, &address], 0, &[1], PATIENCE), 0);
    for known in [first, second] {
        assert_eq!(decode.expect(known, &address, 0, &[2], PATIENCE), Status::InvalidArgument as i32);
        assert!(last_error().contains("is expected already"), "{}", last_error());
    }
    assert_eq!(kvasir_kv_cancel_handoff(decode.handle, first), 0);
    assert_eq!(decode.ended(), (Status::Miss, 0, Ending::Cancelled));
    assert_eq!(decode.expect(second, &address, 0, &[2], Duration::ZERO), 0, "it is forgotten with the first");
}

/// Engines of two processes and of one: each of the two has half of the heads.
#[test]
fn heads_are_shared_out_differently_on_the_two_sides() {
    let of_all = format!("first_head = 0\nheads = 4\nrows = 2\nhead_bytes = \"{} B\"\n", PIECE / 4);
    // A row is the part of a block in one plane; each of the two halves has rows of half the length.
    let of_half = |which: usize| {
        format!("first_head = {}\nheads = 2\nrows = 2\nhead_bytes = \"{} B\"\n", which * 2, PIECE / 4)
    };
    for (transport, one_sends) in [("tcp", true), ("tcp", false), ("shm", true), ("shm", false)] {
        let whole = Engine::with(transport, 1, &of_all, PIECE);
        let halves = [0, 1].map(|which| Engine::with(transport, 2 + which as u8, &of_half(which), PIECE / 2));
        let transfers = [transfer_id(), transfer_id()];
        let heads = |block: u64, which: usize| -> Vec<Vec<u8>> {
            whole.block(block).iter().map(|row| row[which * PIECE / 2..][..PIECE / 2].to_vec()).collect()
        };
        if one_sends {
            for (half, transfer) in halves.iter().zip(transfers) {
                assert_eq!(half.expect(transfer, &whole.address(), 1, &[7, 8], PATIENCE), 0);
            }
            for layer in 0..LAYERS as u32 {
                assert_eq!(whole.push_to(&transfers, 0, &[10, 11, 12], layer..layer + 1), 0);
            }
            whole.end(transfers[0]);
            for (which, half) in halves.iter().enumerate() {
                assert_eq!(half.ended(), (Status::Ok, 2, Ending::Complete));
                for (from, to) in [(11, 7), (12, 8)] {
                    assert_eq!(heads(from, which), half.block(to));
                }
            }
        } else {
            let addresses = [halves[0].address(), halves[1].address()];
            let addresses = addresses.each_ref().map(String::as_str);
            assert_eq!(whole.expect_of(&transfers, &addresses, 1, &[7, 8], PATIENCE), 0);
            for (half, transfer) in halves.iter().zip(transfers) {
                assert_eq!(half.push(transfer, 0, &[10, 11, 12], 0..LAYERS as u32), 0);
                half.end(transfer);
            }
            assert_eq!(whole.ended(), (Status::Ok, 2, Ending::Complete));
            for (which, half) in halves.iter().enumerate() {
                for (from, to) in [(11, 7), (12, 8)] {
                    assert_eq!(half.block(from), heads(to, which));
                }
            }
            // One of two senders stops early: a block counts only if both have sent it.
            let transfers = [transfer_id(), transfer_id()];
            assert_eq!(whole.expect_of(&transfers, &addresses, 0, &[1, 2], PATIENCE), 0);
            assert_eq!(halves[0].push(transfers[0], 0, &[10, 11], 0..LAYERS as u32), 0);
            assert_eq!(halves[1].push(transfers[1], 0, &[10], 0..LAYERS as u32), 0);
            halves.iter().zip(transfers).for_each(|(half, transfer)| half.end(transfer));
            assert_eq!(whole.ended(), (Status::Miss, 1, Ending::SenderStopped));
            for (which, half) in halves.iter().enumerate() {
                assert_eq!(half.block(10), heads(1, which));
            }
        }
        whole.wait_for_rest();
        halves.iter().for_each(Engine::wait_for_rest);
    }
}

/// Random actions on both sides: cancelled, declined, late, in any order. Blocks that arrive are right, and no
/// resource stays in use.
#[test]
fn random_hand_offs_are_right_or_missing() {
    let seed = std::env::var("KVASIR_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(11_u64);
    println!("KVASIR_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut draw = |bound: u64| random.u64(..bound);
    let (mut whole, mut missing) = (0, 0);
    for transport in ["shm", "tcp"] {
        let prefill = Engine::new(transport, 1, "lease = \"2 s\"\n");
        let decode = Engine::new(transport, 2, "");
        for _ in 0..150 {
            let transfer = transfer_id();
            let count = 1 + draw(20) as usize;
            let (first, start) = (draw(count as u64) as usize, draw(30));
            let from: Vec<u64> = (start..start + count as u64).collect();
            let to: Vec<u64> =
                (0..(count - first) as u64).map(|at| (at + start * 2) % BLOCKS as u64).collect();
            let (fault, step) = (draw(8), draw(LAYERS as u64));
            let wait = if fault == 0 { Duration::from_millis(draw(3)) } else { PATIENCE };
            let late = draw(2) == 0;
            let expect =
                || assert_eq!(decode.expect(transfer, &prefill.address(), first as u32, &to, wait), 0);
            let is_declined = fault == 3;
            if is_declined {
                let address = CString::new(prefill.address()).expect("no zero");
                // SAFETY: the address lives during the call.
                let told = unsafe { kvasir_kv_decline_handoff(decode.handle, transfer, address.as_ptr()) };
                assert_eq!(told, 0);
            } else if !late {
                expect();
            }
            for layer in 0..LAYERS as u32 {
                assert_eq!(prefill.push(transfer, 0, &from, layer..layer + 1), 0);
                if u64::from(layer) == step && fault == 1 {
                    assert_eq!(kvasir_kv_cancel_handoff(prefill.handle, transfer), 0);
                }
                if u64::from(layer) == step && fault == 2 && !late {
                    assert_eq!(kvasir_kv_cancel_handoff(decode.handle, transfer), 0);
                }
            }
            if late && !is_declined {
                expect();
            }
            prefill.end(transfer);
            let (status, arrived, _) =
                if is_declined { (Status::Miss, 0, Ending::Cancelled) } else { decode.ended() };
            for _ in 0..LAYERS {
                prefill.ended();
            }
            assert_eq!(status == Status::Ok, arrived as usize == to.len());
            for (from, to) in from[first..].iter().zip(&to[..arrived as usize]) {
                assert_eq!(prefill.block(*from), decode.block(*to), "{transport}");
            }
            if status == Status::Ok { whole += 1 } else { missing += 1 }
        }
        prefill.wait_for_rest();
        decode.wait_for_rest();
        assert_eq!(decode.statistics().checksum_failures, 0);
    }
    assert!(whole > 100 && missing > 20, "{whole} whole, {missing} not");
}

/// A file with a secret of one repeated letter.
struct SecretFile(std::path::PathBuf);

impl SecretFile {
    fn new(letter: &str, bytes: usize) -> Self {
        let name = format!("kvasir-secret-{}-{letter}-{bytes}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, letter.repeat(bytes)).expect("a file");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("permissions");
        Self(path)
    }

    fn line(&self) -> String {
        format!("secret_file = {:?}\n", self.0.display().to_string())
    }
}

impl Drop for SecretFile {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.0);
    }
}

#[test]
fn engines_with_the_same_secret_hand_over_and_others_do_not() {
    let (ours, others) = (SecretFile::new("a", 40), SecretFile::new("b", 40));
    for transport in ["shm", "tcp"] {
        let prefill = Engine::new(transport, 1, &ours.line());
        for (more, expected) in [
            (ours.line(), (Status::Ok, 1, Ending::Complete)),
            (others.line(), (Status::Failed, 0, Ending::PeerDown)),
            (String::new(), (Status::Failed, 0, Ending::PeerDown)),
        ] {
            let decode = Engine::new(transport, 2, &more);
            let (before, transfer) = (decode.planes.clone(), transfer_id());
            assert_eq!(prefill.push(transfer, 0, &[5], 0..LAYERS as u32), 0);
            prefill.end(transfer);
            assert_eq!(decode.expect(transfer, &prefill.address(), 0, &[8], Duration::from_secs(5)), 0);
            let (status, blocks, ending) = decode.ended();
            assert_eq!((blocks, ending), (expected.1, expected.2), "{transport} {more:?}: {status:?}");
            if blocks > 0 {
                assert_eq!(prefill.block(5), decode.block(8));
            } else {
                assert_eq!(decode.planes, before, "{transport} {more:?}");
            }
        }
    }
}

#[test]
fn a_bad_secret_or_place_is_named_when_the_store_is_opened() {
    let short = SecretFile::new("a", 31);
    for (lines, expected) in [
        (format!("[transfer]\n{}", short.line()), "the secret has 31 bytes; it takes at least 32"),
        (
            "[transfer]\nsecret_file = \"/nowhere/secret\"".to_owned(),
            "transfer.secret_file = \"/nowhere/secret\"",
        ),
        ("[transfer]\n[rdma]\nnear = \"the moon\"".to_owned(), "rdma.near: 'the moon' names no place"),
        ("[transfer]\n[rdma]\npartition = \"8001\"".to_owned(), "rdma.partition = \"8001\""),
        ("[transfer]\n[rdma]\ngid = \"x\"".to_owned(), "rdma.gid = \"x\""),
    ] {
        let configuration =
            CString::new(format!("[host_tier]\ncapacity = \"1 MiB\"\n{lines}")).expect("no zero");
        let (mut handle, mut error) = (std::ptr::null_mut(), [0 as c_char; 300]);
        // SAFETY: all of it lives during the call.
        let status = unsafe {
            kvasir_kv_open(configuration.as_ptr(), &raw mut handle, error.as_mut_ptr(), error.len())
        };
        // SAFETY: the library has written an end.
        let error = unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy();
        assert_eq!(status, Status::Configuration as i32, "{lines}");
        assert!(error.contains(expected), "{error} is not {expected}");
    }
}
