//! Transfers over the product's store: host tensors to blocks and back, in pieces and from the disk.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::{Folder, PATIENCE, opened, wait_until_written, with_slab};
use crate::backend::{
    Backend, BackendError, ChainPosition, GetOutcome, Identity, LoadReport, Loaded, PutOutcome, Statistics,
};
use crate::buffers::{Destination, Source};
use crate::config::QueueSettings;
use crate::operation::Operation;
use crate::queue::{Completion, Queue, Submitted, Work};
use crate::registry::Registry;
use crate::status::Status;
use crate::store::READ_MAX;
use crate::tensors::{PagedTensors, Plane, Tensors};
use crate::transfer::{Blocks, Direction, Transfer};

const PIECE: usize = 1500;
const PAGES: usize = 40;

/// Two planes of an engine.
struct Engine {
    planes: [Vec<u8>; 2],
}

impl Engine {
    fn new(seed: usize) -> Self {
        let bytes =
            |plane: usize| (0..PAGES * PIECE).map(move |at| ((at * 31 + at / 257) ^ (plane + seed)) as u8);
        Self { planes: [bytes(0).collect(), bytes(100).collect()] }
    }

    fn register(&mut self, registry: &Registry) -> u64 {
        let planes = self.planes.each_mut().map(|plane| Plane {
            start: plane.as_mut_ptr().cast(),
            block_stride: PIECE as u64,
            block_bytes: PIECE as u64,
        });
        let said =
            Tensors { memory: 0, device: 0, blocks: PAGES as u64, planes: planes.as_ptr(), plane_count: 2 };
        registry.add(PagedTensors::check(&said, &planes, 20_000).expect("right"), None).expect("room")
    }

    fn page(&self, page: usize) -> [&[u8]; 2] {
        self.planes.each_ref().map(|plane| &plane[page * PIECE..][..PIECE])
    }
}

fn name(number: usize) -> Identity {
    u128::from(number as u64 + 1).to_le_bytes()
}

fn work(registry: &Registry, id: u64, direction: Direction, blocks: &[(usize, usize)]) -> Work {
    let tensors = registry.find(id).expect("registered");
    let identities = blocks.iter().map(|(number, _)| name(*number)).collect();
    let blocks = blocks.iter().map(|(_, page)| *page as u64).collect();
    let deadline = Instant::now() + READ_MAX;
    let what = Blocks { direction, tensors, identities, blocks, chain: None, tenant: 0, deadline };
    Work::Shared(Arc::new(Transfer::new(what)))
}

fn moved(queue: &Queue, work: Work) -> (i32, u64, Option<String>) {
    // SAFETY: the tests' engines live until their transfers have ended, and are not read before.
    assert_eq!(unsafe { queue.submit(1, work) }, Submitted::Taken);
    let mut told = None;
    queue.poll(1, Some(PATIENCE), |_, completion, text| {
        told = Some((completion.status, completion.payload_bytes, text));
    });
    told.expect("a completion")
}

#[test]
fn blocks_of_tensors_come_back_from_the_disk_with_little_memory() {
    let folder = Folder::new("paged");
    // Seven slots: fewer than the blocks of a piece, times the threads.
    let store = opened(&folder.configuration("144 KiB", "engine = \"pread\"\n"));
    let queue =
        Queue::new(Arc::clone(&store), &QueueSettings { threads: 3, depth: 8, events: 0 }).expect("starts");
    let registry = Registry::new();
    let (mut engine, mut other) = (Engine::new(1), Engine::new(2));
    let (id, other_id) = (engine.register(&registry), other.register(&registry));
    for page in 0..PAGES {
        let saved = moved(&queue, work(&registry, id, Direction::Save, &[(page, page)]));
        assert_eq!(saved, (Status::Ok as i32, 1, None));
        wait_until_written(&*store, page as u64 + 1);
    }
    let pages: Vec<_> = (0..PAGES).map(|page| (page, PAGES - 1 - page)).collect();
    let loaded = moved(&queue, work(&registry, other_id, Direction::Load, &pages));
    assert_eq!(loaded, (Status::Ok as i32, PAGES as u64, None));
    for (page, at) in &pages {
        assert!(engine.page(*page) == other.page(*at), "block {page}");
    }
    assert!(store.statistics().disk_read > PAGES as u64 - 8, "{:?}", store.statistics());
    queue.close();
    store.close();
}

/// Whether a block is present or was taken; `Err`: the store fails.
type Answer = Result<bool, ()>;

/// A backend that reports which blocks it is asked for, and answers when it is told to.
struct Gate {
    asked: Sender<Identity>,
    answers: std::sync::Mutex<Receiver<Answer>>,
}

impl Gate {
    fn new() -> (Arc<Self>, Receiver<Identity>, Sender<Answer>) {
        let ((asked, is_asked), (answer, answers)) = (channel(), channel());
        (Arc::new(Self { asked, answers: std::sync::Mutex::new(answers) }), is_asked, answer)
    }

    fn pass(&self, identity: &Identity) -> Result<bool, BackendError> {
        self.asked.send(*identity).expect("the test listens");
        let answer = self.answers.lock().expect("no panic").recv_timeout(PATIENCE).expect("an answer");
        answer.map_err(|()| BackendError::Failed { operation: "put", reason: "errno 5".to_owned() })
    }
}

impl Backend for Gate {
    fn matched(&self, identities: &[Identity]) -> Result<usize, BackendError> {
        Ok(identities.len())
    }

    fn get(
        &self,
        _: &Identity,
        _: &mut Destination,
        _: &mut Destination,
    ) -> Result<GetOutcome, BackendError> {
        Ok(GetOutcome::Miss)
    }

    fn get_prefix(
        &self,
        identities: &[Identity],
        _: &mut [Destination],
        _: Instant,
    ) -> Result<Loaded, BackendError> {
        let mut loaded = Loaded::default();
        for identity in identities {
            if !self.pass(identity)? {
                break;
            }
            loaded.blocks += 1;
        }
        Ok(loaded)
    }

    fn observe_load(&self, _: &LoadReport) {}

    fn payload_bytes_max(&self) -> usize {
        usize::MAX
    }

    fn put(
        &self,
        identity: &Identity,
        _: ChainPosition,
        _: &Source,
        _: &Source,
    ) -> Result<PutOutcome, BackendError> {
        Ok(if self.pass(identity)? { PutOutcome::Present } else { PutOutcome::Throttled })
    }

    fn delete(&self, _: &Identity) -> Result<bool, BackendError> {
        Ok(false)
    }

    fn statistics(&self) -> Statistics {
        Statistics::default()
    }
}

fn gated(threads: usize) -> (Queue, Registry, Engine, u64, Receiver<Identity>, Sender<Answer>) {
    let (gate, asked, answer) = Gate::new();
    let queue = Queue::new(gate, &QueueSettings { threads, depth: 8, events: 0 }).expect("starts");
    let registry = Registry::new();
    let mut engine = Engine::new(1);
    let id = engine.register(&registry);
    (queue, registry, engine, id, asked, answer)
}

fn poll(queue: &Queue) -> Vec<Completion> {
    let mut all = Vec::new();
    queue.poll(8, Some(PATIENCE), |_, completion, _| all.push(completion));
    all
}

#[test]
fn a_long_transfer_keeps_no_other_request_from_its_turn() {
    let (queue, registry, _engine, id, asked, answer) = gated(1);
    let pages: Vec<_> = (0..PAGES).map(|page| (page, page)).collect();
    // SAFETY: nothing looks at the engine's memory.
    let submitted = unsafe { queue.submit(7, work(&registry, id, Direction::Save, &pages)) };
    assert_eq!(submitted, Submitted::Taken);
    assert_eq!(asked.recv_timeout(PATIENCE), Ok(name(0)));
    // SAFETY: a delete names no memory.
    assert_eq!(unsafe { queue.submit(8, Operation::Delete { identity: name(0) }) }, Submitted::Taken);
    // The second piece was queued before the delete request.
    for _ in 0..16 {
        answer.send(Ok(true)).expect("it waits");
    }
    assert_eq!(poll(&queue)[0].user, 8, "long before the transfer's end");
    for _ in 16..PAGES {
        answer.send(Ok(true)).expect("it waits");
    }
    let done = poll(&queue)[0];
    assert_eq!((done.user, done.status, done.payload_bytes), (7, 0, PAGES as u64));
    let order: Vec<Identity> = asked.try_iter().collect();
    assert_eq!(order, (1..PAGES).map(name).collect::<Vec<_>>(), "one thread goes in order");
}

#[test]
fn threads_share_a_transfer_and_a_miss_ends_it() {
    let (queue, registry, _engine, id, asked, answer) = gated(4);
    let pages: Vec<_> = (0..PAGES).map(|page| (page, page)).collect();
    // SAFETY: nothing looks at the engine's memory.
    let submitted = unsafe { queue.submit(7, work(&registry, id, Direction::Load, &pages)) };
    assert_eq!(submitted, Submitted::Taken);
    let mut begun: Vec<Identity> =
        (0..4).map(|_| asked.recv_timeout(PATIENCE).expect("four threads begin")).collect();
    begun.sort_unstable();
    assert_eq!(begun, [0, 8, 16, 24].map(name));
    for _ in 0..4 {
        answer.send(Ok(false)).expect("they wait");
    }
    let done = poll(&queue)[0];
    assert_eq!((done.status, done.payload_bytes), (Status::Miss as i32, 0));
    assert!(asked.try_recv().is_err(), "the rest is not begun");
    assert_eq!(registry.remove(id), Ok(()), "nobody works on them");
}

#[test]
fn what_is_not_taken_is_counted_and_what_fails_is_told() {
    for (second, status, blocks) in
        [(Ok(false), Status::Throttled, 2), (Ok(true), Status::Ok, 3), (Err(()), Status::Failed, 0)]
    {
        let (queue, registry, _engine, id, _asked, answer) = gated(2);
        for said in [Ok(true), second, Ok(true)] {
            answer.send(said).expect("it listens");
        }
        let done = moved(&queue, work(&registry, id, Direction::Save, &[(0, 5), (1, 6), (2, 7)]));
        assert_eq!((done.0, done.1), (status as i32, blocks));
        assert_eq!(done.2.as_deref(), (status == Status::Failed).then_some("put: errno 5"));
    }
}

#[test]
fn closing_waits_for_pieces_and_forgets_the_rest() {
    let (queue, registry, _engine, id, asked, answer) = gated(1);
    let pages: Vec<_> = (0..PAGES).map(|page| (page, page)).collect();
    // SAFETY: nothing looks at the engine's memory.
    let submitted = unsafe { queue.submit(7, work(&registry, id, Direction::Save, &pages)) };
    assert_eq!(submitted, Submitted::Taken);
    asked.recv_timeout(PATIENCE).expect("begun");
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| queue.close());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!closing.is_finished(), "a piece is under way");
        for _ in 0..8 {
            answer.send(Ok(true)).expect("it waits");
        }
        closing.join().expect("no panic");
    });
    assert_eq!(asked.try_iter().count(), 7, "one piece in all");
    assert_eq!(registry.remove(id), Ok(()), "the transfer is forgotten");
}

#[test]
fn a_damaged_block_ends_a_load() {
    let (store, slab) = with_slab(4);
    let queue =
        Queue::new(Arc::new(store), &QueueSettings { threads: 2, depth: 8, events: 0 }).expect("starts");
    let registry = Registry::new();
    let mut engine = Engine::new(3);
    let id = engine.register(&registry);
    let pages = [(0, 0), (1, 1), (2, 2)];
    for page in &pages {
        assert_eq!(moved(&queue, work(&registry, id, Direction::Save, &[*page])).1, 1);
    }
    let slot = (0..4)
        .find(|slot| {
            let mut start = vec![0; 64 + PIECE];
            slab.read(*slot, 0, &mut start);
            start[64..] == *engine.page(1)[0]
        })
        .expect("it is in memory");
    slab.write(slot, 500, &[!engine.page(1)[0][436]]);
    let loaded = moved(&queue, work(&registry, id, Direction::Load, &pages));
    assert_eq!(loaded, (Status::Miss as i32, 1, None));
}
