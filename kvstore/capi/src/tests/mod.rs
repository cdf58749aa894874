//! The product's store behind the interface: blocks are read back intact, from memory and from the disk, or not
//! at all.

mod paged;
mod slow_disk;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab};
use kvstore_block::BlockIdentity;
use kvstore_catalog::PolicyKind;
use kvstore_store::{Description, DiskTier, HostTier, StoreBuilder, StoreConfig, TenantId};

use crate::backend::{Backend, BackendError, ChainPosition, GetOutcome, Identity, Loaded, PutOutcome};
use crate::buffers::{Buffer, Destination, Ranges, Source};
use crate::compose::{self, StoreParts};
use crate::config::Settings;
use crate::format::{HEAD_BYTES_MAX, META_BYTES_MAX};
use crate::status::{Failure, Status};
use crate::store::StoreBackend;

const PATIENCE: Duration = Duration::from_secs(20);
const PAYLOAD_MAX: usize = 20_000;

/// A folder of this test, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvasir-capi-{name}-{}", std::process::id()));
        let _absent = std::fs::remove_dir_all(&path);
        Self(path)
    }

    fn configuration(&self, host: &str, more: &str) -> String {
        format!(
            "[store]\nslot = \"20000 B\"\n[host_tier]\ncapacity = \"{host}\"\n\
             [disk_tier]\ncapacity = \"8 MiB\"\nsegment = \"4 MiB\"\npath = \"{}\"\n{more}",
            self.0.display()
        )
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _left = std::fs::remove_dir_all(&self.0);
    }
}

fn compose(text: &str) -> Result<StoreParts, Failure> {
    compose::open(text, &|_| unreachable!("no device"), None)
}

fn opened(text: &str) -> Arc<dyn Backend> {
    compose(text).unwrap_or_else(|failure| panic!("{}", failure.text)).backend
}

/// `/proc/self/numa_maps` has the preferred node of the mapping (numa(7)).
#[test]
fn host_memory_is_of_the_node_that_the_process_runs_on() {
    let (Some(node), true) =
        (dataplane_rails::nearest_node(None), std::path::Path::new("/proc/self/numa_maps").exists())
    else {
        return eprintln!("SKIPPED: this process may run on several NUMA nodes, or the kernel knows of none");
    };
    let composed = compose("[store]\nslot = \"64 KiB\"\n[host_tier]\ncapacity = \"160 MiB\"\n");
    let backend = composed.unwrap_or_else(|failure| panic!("{}", failure.text)).backend;
    let start = format!("{:08x} ", backend.store().slab().base().addr().get());
    let maps = std::fs::read_to_string("/proc/self/numa_maps").expect("it was there");
    let line = maps.lines().find(|line| line.starts_with(&start)).expect("the mapping");
    assert!(line.contains("prefer") && line.contains(&format!(":{} ", node.number)), "{line}");
}

fn ranges(bytes: &[u8]) -> Ranges {
    let buffer = Buffer { start: bytes.as_ptr().cast_mut().cast(), bytes: bytes.len() };
    Ranges::check(&[buffer]).expect("a slice is valid")
}

fn put(
    store: &dyn Backend,
    identity: &Identity,
    meta: &[u8],
    payload: &[u8],
) -> Result<PutOutcome, BackendError> {
    // SAFETY: the slices outlive the call and are only read.
    let meta = unsafe { Source::new(ranges(meta)) };
    // SAFETY: as above.
    let payload = unsafe { Source::new(ranges(payload)) };
    store.put(identity, ChainPosition::default(), &meta, &payload)
}

/// Meta and payload of a block.
type Block = (Vec<u8>, Vec<u8>);

/// Returns the block, or `None` if it is absent.
fn get(store: &dyn Backend, identity: &Identity) -> Result<Option<Block>, BackendError> {
    let (outcome, block) = ask(store, identity)?;
    assert_ne!(outcome, GetOutcome::Throttled);
    Ok((outcome == GetOutcome::Read).then_some(block))
}

fn ask(store: &dyn Backend, identity: &Identity) -> Result<(GetOutcome, Block), BackendError> {
    let (mut meta, mut payload) = (vec![0; META_BYTES_MAX], vec![0; PAYLOAD_MAX]);
    let place = |bytes: &mut Vec<u8>| {
        let buffer = Buffer { start: bytes.as_mut_ptr().cast(), bytes: bytes.len() };
        Ranges::check(&[buffer]).expect("a vector is valid")
    };
    // SAFETY: the vectors are used by no other code until the destinations are dropped.
    let mut to_meta = unsafe { Destination::new(place(&mut meta)) };
    // SAFETY: as above.
    let mut to_payload = unsafe { Destination::new(place(&mut payload)) };
    let outcome = store.get(identity, &mut to_meta, &mut to_payload)?;
    let (meta_bytes, payload_bytes) = (to_meta.filled(), to_payload.filled());
    meta.truncate(meta_bytes);
    payload.truncate(payload_bytes);
    Ok((outcome, (meta, payload)))
}

fn identity(number: u32) -> Identity {
    u128::from(number).to_le_bytes()
}

/// A block whose sizes and bytes follow from its number.
fn block(number: u32) -> Block {
    let sizes = [0, 1, 4096, 12_345, PAYLOAD_MAX];
    let payload =
        (0..sizes[number as usize % sizes.len()]).map(|at| (at as u32 * 7 + number) as u8).collect();
    (vec![number as u8; (number as usize * 37) % (META_BYTES_MAX + 1)], payload)
}

fn put_all(store: &dyn Backend, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let (meta, payload) = block(number);
        assert_eq!(put(store, &identity(number), &meta, &payload), Ok(PutOutcome::Stored), "{number}");
    }
}

fn wait_until_written(store: &dyn Backend, blocks: u64) {
    let deadline = Instant::now() + PATIENCE;
    while store.statistics().disk_written < blocks {
        assert!(Instant::now() < deadline, "{:?}", store.statistics());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn blocks_on_the_disk_survive_a_restart_with_their_meta() {
    let folder = Folder::new("restart");
    let text = folder.configuration("4 MiB", "");
    let store = opened(&text);
    put_all(&*store, 0..30);
    wait_until_written(&*store, 30);
    assert_eq!(store.delete(&identity(3)), Ok(true));
    store.close();
    assert!(matches!(get(&*store, &identity(1)), Err(BackendError::Failed { .. })), "closed");
    assert!(matches!(put(&*store, &identity(99), &[], &[]), Err(BackendError::Failed { .. })), "closed");

    let store = opened(&text);
    let statistics = store.statistics();
    assert_eq!((statistics.blocks, statistics.disk_blocks), (0, 29));
    let all: Vec<Identity> = (0..30).map(identity).collect();
    assert_eq!(store.matched(&all), Ok(3), "the fourth was deleted");
    for number in (0..30).filter(|number| *number != 3) {
        assert_eq!(get(&*store, &identity(number)), Ok(Some(block(number))), "{number}");
    }
    assert_eq!(get(&*store, &identity(3)), Ok(None));
    assert_eq!(put(&*store, &identity(0), &[], &[1]), Ok(PutOutcome::Present));
    let statistics = store.statistics();
    assert_eq!((statistics.hits, statistics.misses, statistics.disk_read), (29, 1, 29));
    store.close();
}

#[test]
fn several_folders_take_equal_shares_and_survive_a_restart() {
    let folder = Folder::new("shares");
    let paths = ["one", "two"].map(|name| folder.0.join(name));
    let list = format!("[\"{}\", \"{}\"]", paths[0].display(), paths[1].display());
    let one = format!("\"{}\"", folder.0.display());
    let text = folder.configuration("4 MiB", "").replace(&one, &list);
    let store = opened(&text);
    put_all(&*store, 0..60);
    wait_until_written(&*store, 60);
    store.close();
    // A slot is five pages, and new files are zeros.
    let used = paths.each_ref().map(|path| {
        let bytes = std::fs::read(path.join("segment-0000")).expect("a segment");
        bytes.chunks(4096).filter(|page| page.iter().any(|byte| *byte != 0)).count()
    });
    assert!(used[0].abs_diff(used[1]) <= 5 && used[0] >= 60, "{used:?} pages");
    assert!(paths.iter().all(|path| !path.join("segment-0001").exists()), "8 MiB in files of 4 MiB");
    let store = opened(&text);
    for number in 0..60 {
        assert_eq!(get(&*store, &identity(number)), Ok(Some(block(number))), "{number}");
    }
    store.close();
    // The order of the folders is part of a block's place: another order is refused without side effects.
    let swapped = format!("[\"{}\", \"{}\"]", paths[1].display(), paths[0].display());
    let Err(refused) = compose(&text.replace(&list, &swapped)) else { panic!("opened with folders swapped") };
    assert!(refused.text.contains("disk_tier.path"), "{}", refused.text);
    let alone = folder.configuration("4 MiB", "").replace(&one, &format!("\"{}\"", paths[1].display()));
    assert!(compose(&alone).is_err(), "the second folder alone");
    let store = opened(&text);
    assert_eq!(store.statistics().disk_blocks, 60, "all are still there");
    store.close();
}

#[test]
fn engines_that_take_a_device_say_which() {
    let folder = Folder::new("device");
    for (engine, text) in [
        ("nvme-user", "is not a PCI address like `0000:01:00.0`, which `nvme-user` needs"),
        ("spdk", "is not a PCI address like `0000:01:00.0`, which `spdk` needs"),
        ("nvme-passthrough", "disk_tier.path = "),
        ("floppy", "\"floppy\" is none of auto"),
    ] {
        let refused = compose(&folder.configuration("1 MiB", &format!("engine = \"{engine}\"\n")));
        let Err(refused) = refused else { panic!("opened {engine} on a folder") };
        assert!(refused.text.contains(text), "{engine}: {}", refused.text);
    }
}

#[test]
fn what_leaves_memory_is_read_from_the_disk() {
    let folder = Folder::new("below");
    // Seven slots.
    let store = opened(&folder.configuration("144 KiB", "engine = \"pread\"\n"));
    for number in 0..60 {
        put_all(&*store, number..number + 1);
        // If puts outran the disk, they would find memory in use by writes, or stay in memory alone.
        wait_until_written(&*store, u64::from(number) + 1);
    }
    for number in 0..60 {
        assert_eq!(get(&*store, &identity(number)), Ok(Some(block(number))), "{number}");
    }
    let statistics = store.statistics();
    assert_eq!((statistics.blocks, statistics.disk_blocks), (7, 60));
    assert!(statistics.evicted >= 53 && statistics.disk_read >= 53, "{statistics:?}");
    assert_eq!((statistics.bytes, statistics.bytes_max), (7 * 20_480, 7 * 20_480));
}

#[test]
fn a_log_of_other_slots_is_refused_unless_it_may_be_made_anew() {
    let folder = Folder::new("slots");
    let store = opened(&folder.configuration("1 MiB", ""));
    put_all(&*store, 1..3);
    let Err(taken) = compose(&folder.configuration("1 MiB", "")) else { panic!("opened twice") };
    assert!(taken.status == Status::Failed && taken.text.contains("disk_tier.path"), "{}", taken.text);
    store.close();
    let other = folder.configuration("1 MiB", "").replace("20000 B", "8 KiB");
    let Err(refused) = compose(&other) else { panic!("opened with another slot") };
    assert!(refused.status == Status::Failed && refused.text.contains("reformat"), "{}", refused.text);
    let store = opened(&format!("{other}reformat = true\n"));
    assert_eq!(store.matched(&[identity(1)]), Ok(0));
    store.close();
}

#[test]
fn what_is_too_large_is_refused_by_its_part() {
    let store = opened("[store]\nslot = \"20000 B\"\n[host_tier]\ncapacity = \"1 MiB\"\n");
    let largest = (vec![5; META_BYTES_MAX], vec![6; PAYLOAD_MAX]);
    assert_eq!(put(&*store, &identity(1), &largest.0, &largest.1), Ok(PutOutcome::Stored));
    assert_eq!(get(&*store, &identity(1)), Ok(Some(largest)));
    for (meta, payload, part) in [(META_BYTES_MAX + 1, 0, "a meta"), (0, PAYLOAD_MAX + 1, "a payload")] {
        let refused = put(&*store, &identity(2), &vec![0; meta], &vec![0; payload]);
        assert!(matches!(&refused, Err(BackendError::TooLarge { what, .. }) if *what == part), "{refused:?}");
    }
    assert_eq!(get(&*store, &identity(2)), Ok(None));
}

#[test]
fn more_memory_than_there_is_is_refused() {
    let Err(refused) = compose("[host_tier]\ncapacity = \"16 TiB\"\n") else { panic!("16 TiB were taken") };
    assert!(
        refused.status == Status::Failed && refused.text.contains("host_tier.capacity"),
        "{}",
        refused.text
    );
}

/// Returns a store over `slots` slots, and the slab, so that the test can change its memory.
fn with_slab(slots: u32) -> (StoreBackend, Arc<Slab>) {
    with_slab_over(slots, None)
}

fn with_slab_over(slots: u32, disk: Option<DiskTier>) -> (StoreBackend, Arc<Slab>) {
    let host = HostTier { slots, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let config = StoreConfig::new(PAYLOAD_MAX + HEAD_BYTES_MAX, 1);
    let mut builder = StoreBuilder::new(config, host).expect("memory");
    let slab = Arc::clone(builder.slab());
    if let Some(disk) = disk {
        builder = builder.disk(disk);
    }
    let (store, _) = builder.start(|_| {}).expect("threads");
    (StoreBackend::new(store, PAYLOAD_MAX, 20_480), slab)
}

#[test]
fn a_damaged_block_is_a_miss_and_thrown_away() {
    let (meta, payload) = block(4);
    // Damage in the length of the meta, in the meta, and in the payload.
    for at in [0, 1, 10, 17_000] {
        let (store, slab) = with_slab(1);
        assert_eq!(put(&store, &identity(4), &meta, &payload), Ok(PutOutcome::Stored));
        let mut byte = [0];
        slab.read(0, at, &mut byte);
        slab.write(0, at, &[byte[0] ^ 1]);
        assert_eq!(get(&store, &identity(4)), Ok(None), "damaged at {at}");
        let statistics = store.statistics();
        assert_eq!((statistics.hits, statistics.misses, statistics.damaged), (0, 1, 1), "damaged at {at}");
        assert_eq!(store.delete(&identity(4)), Ok(false), "thrown away before");
        assert_eq!(put(&store, &identity(4), &meta, &payload), Ok(PutOutcome::Stored));
        assert_eq!(get(&store, &identity(4)), Ok(Some((meta.clone(), payload.clone()))));
    }
}

#[test]
fn a_block_damaged_on_the_disk_is_a_miss_that_is_counted() {
    let folder = Folder::new("flipped");
    let text = folder.configuration("4 MiB", "engine = \"pread\"\n");
    let store = opened(&text);
    put_all(&*store, 4..6);
    wait_until_written(&*store, 2);
    store.close();
    drop(store);
    let (_, payload) = block(4);
    let is_flipped = |segment: &PathBuf| {
        let mut bytes = std::fs::read(segment).expect("a segment");
        let Some(at) = bytes.windows(64).position(|window| *window == payload[9000..9064]) else {
            return false;
        };
        bytes[at] ^= 1;
        std::fs::write(segment, bytes).expect("written");
        true
    };
    let segments = ["segment-0000", "segment-0001"].map(|name| folder.0.join(name));
    assert_eq!(
        segments.iter().filter(|segment| is_flipped(segment)).count(),
        1,
        "the payload lies in one file"
    );

    let store = opened(&text);
    assert_eq!((store.matched(&[identity(4)]), store.statistics().damaged), (Ok(1), 0), "not looked at yet");
    assert_eq!(get(&*store, &identity(4)), Ok(None));
    let statistics = store.statistics();
    assert_eq!((statistics.hits, statistics.misses, statistics.damaged), (0, 1, 1), "{statistics:?}");
    // Read once more, found damaged by the disk's log, and discarded there too.
    let deadline = Instant::now() + Duration::from_secs(20);
    while store.matched(&[identity(4)]) != Ok(0) {
        assert!(Instant::now() < deadline, "the damaged copy stays on the disk");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(get(&*store, &identity(5)), Ok(Some(block(5))), "the other is as it was");
    store.close();
}

#[test]
fn a_block_damaged_in_memory_alone_is_read_from_the_disk_next() {
    let folder = Folder::new("host-damaged");
    let text = folder.configuration("4 MiB", "engine = \"pread\"\n");
    let settings = Settings::parse(&text).unwrap_or_else(|failure| panic!("{}", failure.text));
    let (store, slab) = with_slab_over(1, Some(compose::disk(&settings, |engine| engine)));
    put_all(&store, 4..5);
    wait_until_written(&store, 1);
    let mut byte = [0];
    slab.read(0, 9000, &mut byte);
    slab.write(0, 9000, &[byte[0] ^ 1]);
    assert_eq!(get(&store, &identity(4)), Ok(None));
    assert_eq!(get(&store, &identity(4)), Ok(Some(block(4))), "the disk's copy is good");
    assert_eq!(store.statistics().damaged, 1);
    store.close();
}

#[test]
fn what_was_put_whole_meanwhile_is_not_thrown_away() {
    let (store, slab) = with_slab(1);
    let (meta, payload) = block(4);
    assert_eq!(put(&store, &identity(4), &meta, &payload), Ok(PutOutcome::Stored));
    // A reader found the block damaged, and another has put it again before the first discards it.
    assert_eq!(store.discard_block(&identity(4)), Ok(()));
    assert_eq!(get(&store, &identity(4)), Ok(Some((meta, payload))));
    slab.write(0, 10, &[0xA5, 0x5A]);
    assert_eq!(store.discard_block(&identity(4)), Ok(()));
    assert_eq!(store.matched(&[identity(4)]), Ok(0));
}

#[test]
fn a_name_that_went_to_another_block_is_found_out() {
    let (store, _slab) = with_slab(8);
    put_all(&store, 0..3);
    let names = [0, 1, 2].map(identity);
    let deadline = Instant::now() + PATIENCE;
    let held = store.hold_prefix(&names, |_| true, deadline, &mut Loaded::default()).expect("held");
    assert_eq!((held.len(), store.unchanged(&names, &held)), (3, 3));
    assert_eq!(store.delete(&names[1]), Ok(true));
    assert_eq!(store.unchanged(&names, &held), 1, "it is gone");
    // The same bytes again, but in another slot: the block may have changed meanwhile.
    put_all(&store, 1..2);
    assert_eq!(store.unchanged(&names, &held), 1, "it is another");
    assert_eq!(store.unchanged(&names[2..], &held[2..]), 1);
}

#[test]
fn whole_bytes_that_are_no_block_are_thrown_away() {
    let (store, _) = with_slab(1);
    let (done, is_stored) = channel();
    let done = move |stored| {
        let _gone = done.send(stored);
    };
    let description = Description { parent: None, position: 0, meta: [].into(), tenant: TenantId(0) };
    let nonsense = vec![vec![0xFF; 100].into()];
    assert!(store.store().put(BlockIdentity(identity(1)), description, nonsense, done).is_ok());
    assert_eq!(is_stored.recv_timeout(PATIENCE), Ok(true));
    assert_eq!(get(&store, &identity(1)), Ok(None));
    assert_eq!((store.matched(&[identity(1)]), store.statistics().damaged), (Ok(0), 1));
}

#[test]
fn too_many_requests_inside_are_an_outcome_of_a_read() {
    let (store, _) = with_slab(1);
    assert_eq!(put(&store, &identity(1), b"m", b"first"), Ok(PutOutcome::Stored));
    let (reached, is_busy) = channel();
    let (release, released) = channel::<()>();
    let deadline = Instant::now() + PATIENCE;
    // The answer runs on the store's thread, which takes no more requests while it waits.
    let hold = move |_| {
        let _gone = reached.send(());
        let _released = released.recv_timeout(PATIENCE);
    };
    assert!(store.store().hold(Vec::new(), deadline, hold).is_ok());
    is_busy.recv_timeout(PATIENCE).expect("busy");
    while store.store().hold(Vec::new(), deadline, |_| {}).is_ok() {
        assert!(Instant::now() < deadline, "never full");
    }
    assert_eq!(ask(&store, &identity(1)).map(|(outcome, _)| outcome), Ok(GetOutcome::Throttled));
    assert_eq!((store.statistics().hits, store.statistics().misses), (0, 0));
    release.send(()).expect("it waits");
    while ask(&store, &identity(1)).map(|(outcome, _)| outcome) != Ok(GetOutcome::Read) {
        assert!(Instant::now() < deadline, "never empty");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn no_room_is_an_outcome() {
    let (store, _) = with_slab(1);
    assert_eq!(put(&store, &identity(1), b"m", b"first"), Ok(PutOutcome::Stored));
    let (reply, held) = channel();
    let hold = move |blocks| {
        let _gone = reply.send(blocks);
    };
    assert!(store.store().hold(vec![BlockIdentity(identity(1))], Instant::now() + PATIENCE, hold).is_ok());
    let held = held.recv_timeout(PATIENCE).expect("an answer");
    assert_eq!(put(&store, &identity(2), b"m", b"second"), Ok(PutOutcome::Throttled));
    drop(held);
    assert_eq!(put(&store, &identity(2), b"m", b"second"), Ok(PutOutcome::Stored));
    assert_eq!((store.statistics().throttled, store.statistics().stored), (1, 2));
}

#[test]
fn changes_of_one_block_take_turns() {
    let folder = Folder::new("turns");
    let store = opened(&folder.configuration("4 MiB", ""));
    for round in 0..200_u8 {
        let outcomes = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|thread| {
                    let store = &store;
                    scope.spawn(move || put(&**store, &identity(1), &[round, thread], &[thread; 9000]))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>()
        });
        let winners: Vec<u8> = (0..)
            .zip(&outcomes)
            .filter(|(_, put)| **put == Ok(PutOutcome::Stored))
            .map(|(at, _)| at)
            .collect();
        let [winner] = winners[..] else { panic!("round {round}: {outcomes:?}") };
        assert_eq!(outcomes.iter().filter(|put| **put == Ok(PutOutcome::Present)).count(), 3);
        let expected = (vec![round, winner], vec![winner; 9000]);
        assert_eq!(get(&*store, &identity(1)), Ok(Some(expected)), "round {round}");
        assert_eq!(store.delete(&identity(1)), Ok(true), "round {round}");
        assert_eq!(get(&*store, &identity(1)), Ok(None), "round {round}");
        assert_eq!(store.delete(&identity(1)), Ok(false), "round {round}");
    }
    store.close();
}
