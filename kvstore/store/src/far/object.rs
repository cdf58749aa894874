//! Objects in S3 or a folder: the runtime that their requests run on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_object::{Block, ObjectTier as Objects, Outcome};
use kvstore_plan::Tier;
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use crate::far::{FarInbox, FarResult, FarTier, Incoming, Outgoing, Portion};

/// Look-ups and reads under way at a time.
const REQUESTS_MAX: usize = 256;
/// Runs being written at a time: further ones are dropped, nobody waits for them.
const PUTS_MAX: usize = 8;
/// Objects that are too old are deleted so often, and so many at a time.
const SWEEP_EVERY: Duration = Duration::from_secs(3600);
const SWEEP_MAX: u64 = 100_000;
/// How long one may take.
const PUT_MAX: Duration = Duration::from_secs(60);

/// The way to the objects.
pub struct ObjectTier {
    runtime: Option<Runtime>,
    objects: Arc<Objects>,
    run: u32,
    patience: Duration,
    inbox: FarInbox,
    requests: Arc<Semaphore>,
    puts: Arc<Semaphore>,
}

impl ObjectTier {
    /// Starts the runtime, one thread.
    pub fn start(
        objects: Arc<Objects>,
        run: u32,
        patience: Duration,
        inbox: FarInbox,
    ) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kvasir-object-tier")
            .enable_all()
            .build()?;
        let (requests, puts) = (Arc::new(Semaphore::new(REQUESTS_MAX)), Arc::new(Semaphore::new(PUTS_MAX)));
        let sweeping = Arc::clone(&objects);
        drop(runtime.spawn(async move {
            loop {
                tokio::time::sleep(SWEEP_EVERY).await;
                if let Err(error) = sweeping.sweep(SWEEP_MAX, (Instant::now() + SWEEP_EVERY).into()).await {
                    tracing::warn!("object tier: old objects were not deleted: {error}");
                }
            }
        }));
        Ok(Self { runtime: Some(runtime), objects, run, patience, inbox, requests, puts })
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.runtime {
            // It answers through the inbox.
            drop(runtime.spawn(work));
        }
    }
}

impl FarTier for ObjectTier {
    fn tier(&self) -> Tier {
        Tier::Object
    }

    fn patience(&self) -> Duration {
        self.patience
    }

    fn look_up(&mut self, request: u64, chain: &[BlockIdentity], first: usize, deadline: Instant) -> bool {
        let Ok(permit) = Arc::clone(&self.requests).try_acquire_owned() else { return false };
        let (objects, inbox, chain) = (Arc::clone(&self.objects), self.inbox.clone(), chain.to_vec());
        self.spawn(async move {
            let found = objects.look_up(&chain, deadline.into()).await;
            drop(permit);
            inbox.send(FarResult::Found { request, blocks: found.saturating_sub(first) });
        });
        true
    }

    fn read(&mut self, incoming: Incoming) -> Result<(), Incoming> {
        let Ok(permit) = Arc::clone(&self.requests).try_acquire_owned() else { return Err(incoming) };
        let (objects, inbox) = (Arc::clone(&self.objects), self.inbox.clone());
        self.spawn(async move {
            let range = incoming.first..incoming.first + incoming.targets.len();
            let blocks = objects.get(&incoming.chain, range, incoming.deadline.into()).await;
            drop(permit);
            let mut bytes = Vec::with_capacity(blocks.len());
            for (block, target) in blocks.iter().zip(&incoming.targets) {
                if block.payload.len() > target.slab().layout().slot_bytes {
                    break;
                }
                target.slab().write(target.slot(), 0, &block.payload);
                bytes.push(block.payload.len() as u32);
            }
            inbox.send(FarResult::Arrived { incoming, bytes });
        });
        Ok(())
    }

    fn leave(&mut self, _request: u64) {}

    fn portion(&self) -> Portion {
        Portion::Run(self.run)
    }

    fn offer(&mut self, blocks: Vec<Outgoing>, _head: BlockIdentity) {
        let Ok(permit) = Arc::clone(&self.puts).try_acquire_owned() else { return };
        let (objects, inbox) = (Arc::clone(&self.objects), self.inbox.clone());
        self.spawn(async move {
            let whole: Option<Vec<Block>> = (blocks.iter())
                .map(|block| {
                    let (identity, meta) = (block.identity, block.description.meta.to_vec().into());
                    Some(Block { identity, meta, payload: block.block.to_bytes()?.into() })
                })
                .collect();
            // The slots are free again; the upload has bytes of its own.
            let count = blocks.len();
            drop(blocks);
            let Some(run) = whole else { return };
            match objects.put(&run, (Instant::now() + PUT_MAX).into()).await {
                Ok(Outcome::Stored) => inbox.send(FarResult::Kept { blocks: count }),
                Ok(Outcome::Present | Outcome::Throttled) => {}
                Err(error) => tracing::warn!("object tier: {error}"),
            }
            drop(permit);
        });
    }
}

impl Drop for ObjectTier {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
