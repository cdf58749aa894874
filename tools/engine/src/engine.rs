//! The engine's thread and the handle to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use dataplane_transfer::{Notice, TransferService};
use kvstore_block::IdentityChain;
use kvstore_store::{RecoveredBlock, Store, StoreEvent};
use router_openai::{Finish, Sampling, StructuredOutput};
use router_tokens::{Detokenizer, ModelText};
use tokio::sync::mpsc;
use tools_grammar::{Grammar, GrammarCompiler, GrammarError};

use crate::events::EventSink;
use crate::model::Model;
use crate::scheduler::Scheduler;
use crate::sequence::{Goal, RemotePrefill, Sequence, Start};
use crate::{Choice, EngineConfig, EngineError, EngineStats, KvPool};

/// Largest number of submitted requests that the engine's thread has not taken yet. Cancellations and notices are at most a
/// few per request, and must never wait: two threads that wait for each other would be deadlocked.
const SUBMITTED_MAX: u64 = 16_384;
/// Time after which the engine tries again when no request can run because blocks are held elsewhere.
const BLOCKED_RECHECK: Duration = Duration::from_millis(20);

/// A request to the engine.
#[derive(Debug, Clone)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Sampling parameters. `n` is ignored; the caller submits each choice.
    pub sampling: Sampling,
    /// Salt and other keys that separate the request's cached blocks.
    pub extras: Vec<String>,
    /// Compute the prompt's blocks and push them under this transfer instead of generating.
    pub push_to: Option<u64>,
    /// Fetch the prompt's blocks: transfer and address of the sender's data plane.
    pub fetch_from: Option<(u64, String)>,
    /// Time for which the request's blocks are retained in the store; zero: no longer than any other's.
    pub retain_for: Duration,
    /// Grammar that keeps the output within a schema; compiled by [`EngineHandle::compile_grammar`] after the same resumed tokens.
    pub grammar: Option<Grammar>,
}

/// One piece of a generation.
#[derive(Debug, Clone, Default)]
pub struct Output {
    /// Tokens of this piece.
    pub tokens: Vec<u32>,
    /// Text completed by this piece.
    pub text: String,
    /// Chosen token with log-probabilities, when requested.
    pub choice: Option<Choice>,
    /// Reason of the end, on the last piece.
    pub finish: Option<Finish>,
    /// Prompt tokens that were cached at this worker.
    pub cached_tokens: usize,
}

/// Reason for which a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue is full.
    #[error("the engine's queue is full")]
    Full,
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

pub(crate) enum Message {
    Submit(Box<Sequence>),
    Cancel(u64),
    Transfer(Notice),
    Store(StoreEvent),
    ClearCache,
    Stop,
}

/// Other parts of the worker that the engine uses.
#[derive(Default)]
pub struct Services {
    /// Moves blocks between workers.
    pub transfer: Option<TransferService>,
    /// Stores blocks outside of the pool.
    pub store: Option<Arc<Store>>,
    /// Blocks that the store has kept from an earlier process.
    pub survivors: Vec<RecoveredBlock>,
    /// Publishes KV events.
    pub events: Option<EventSink>,
}

/// Sender of notices from the other parts, which exist before the engine does.
#[derive(Clone)]
pub struct EngineInbox(Sender<Message>);

impl EngineInbox {
    /// Passes a notice of the transfer service to the engine.
    pub fn transfer_notice(&self, notice: Notice) {
        // An engine that has stopped needs no notices.
        let _stopped = self.0.send(Message::Transfer(notice));
    }

    /// Passes a report of the store to the engine.
    pub fn store_moved(&self, moved: StoreEvent) {
        let _stopped = self.0.send(Message::Store(moved));
    }
}

/// An engine that is not running yet.
pub struct Engine {
    inbox: Receiver<Message>,
    sender: Sender<Message>,
}

impl Default for Engine {
    fn default() -> Self {
        Self::new()
    }
}

impl Engine {
    /// Makes the engine's inbox.
    #[must_use]
    pub fn new() -> Self {
        let (sender, inbox) = unbounded();
        Self { inbox, sender }
    }

    /// Returns a sender for notices.
    #[must_use]
    pub fn inbox(&self) -> EngineInbox {
        EngineInbox(self.sender.clone())
    }

    /// Starts the thread.
    pub fn start(
        self,
        config: EngineConfig,
        model: Model,
        text: ModelText,
        kv: KvPool,
        services: Services,
    ) -> Result<EngineHandle, EngineError> {
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(config.threads)
            .thread_name(|index| format!("kvasir-compute-{index}"))
            .build()
            .map_err(|error| EngineError::Thread(std::io::Error::other(error)))?;
        let stats = Arc::new(EngineStats::default());
        let fingerprint = model.fingerprint() ^ kv.layout().fingerprint();
        let capacity_tokens = kv.slots().slot_count() * kv.block_tokens();
        let shared = Arc::new(Shared {
            text: text.clone(),
            fingerprint,
            context_tokens: config.context_tokens.min(capacity_tokens.saturating_sub(kv.block_tokens())),
            vocabulary: model.config().vocabulary,
            compiler: Arc::new(GrammarCompiler::new(text.clone(), model.config().vocabulary)),
            next_id: AtomicU64::new(1),
            stats: Arc::clone(&stats),
        });
        let scheduler = Scheduler::new(config, model, text, kv, services, stats);
        let inbox = self.inbox;
        let thread = std::thread::Builder::new()
            .name("kvasir-engine".to_owned())
            .spawn(move || threads.install(|| run(scheduler, &inbox)))
            .map_err(EngineError::Thread)?;
        Ok(EngineHandle { sender: self.sender, shared, thread: Arc::new(Joiner(Some(thread))) })
    }
}

fn run(mut scheduler: Scheduler, inbox: &Receiver<Message>) {
    loop {
        let mut next = match (scheduler.has_work(), scheduler.is_blocked()) {
            (true, _) => inbox.try_recv().ok(),
            (false, true) => inbox.recv_timeout(BLOCKED_RECHECK).ok(),
            (false, false) => match inbox.recv() {
                Ok(message) => Some(message),
                Err(_) => return,
            },
        };
        while let Some(message) = next {
            match message {
                Message::Stop => return,
                Message::Submit(sequence) => {
                    scheduler.taken();
                    scheduler.submit(*sequence);
                }
                Message::Cancel(id) => scheduler.cancel(id),
                Message::Transfer(notice) => scheduler.transfer_notice(notice),
                Message::Store(moved) => scheduler.store_moved(moved),
                Message::ClearCache => scheduler.clear_cache(),
            }
            next = inbox.try_recv().ok();
        }
        scheduler.step();
    }
}

struct Shared {
    text: ModelText,
    fingerprint: u64,
    context_tokens: usize,
    vocabulary: usize,
    compiler: Arc<GrammarCompiler>,
    next_id: AtomicU64,
    stats: Arc<EngineStats>,
}

struct Joiner(Option<JoinHandle<()>>);

/// Handle to a running engine. Cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    sender: Sender<Message>,
    shared: Arc<Shared>,
    thread: Arc<Joiner>,
}

impl EngineHandle {
    /// Tokenizer and template.
    #[must_use]
    pub fn text(&self) -> &ModelText {
        &self.shared.text
    }

    /// Longest sequence: the model's limit, the configured one, and what fits into the pool.
    #[must_use]
    pub fn context_tokens(&self) -> usize {
        self.shared.context_tokens
    }

    /// Number of token ids: the largest id plus one.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.shared.vocabulary
    }

    /// Counters of the engine.
    #[must_use]
    pub fn stats(&self) -> &Arc<EngineStats> {
        &self.shared.stats
    }

    /// Compiles the grammar of an output, after the last tokens of a prompt when these are an interrupted run's output. Waits
    /// while [`GRAMMARS_MAX`](tools_grammar::GRAMMARS_MAX) requests have one.
    pub async fn compile_grammar(
        &self,
        output: &Arc<StructuredOutput>,
        resumed: Vec<u32>,
    ) -> Result<Grammar, GrammarError> {
        self.shared.compiler.compile(output, resumed).await
    }

    /// Number of requests that have a grammar, and of requests that wait for one.
    #[must_use]
    pub fn grammars(&self) -> [usize; 2] {
        self.shared.compiler.counts()
    }

    /// Queues a request.
    pub fn submit(&self, request: Request) -> Result<OutputStream, SubmitError> {
        assert!(!request.prompt.is_empty(), "a prompt has at least one token");
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let room = self.shared.context_tokens.saturating_sub(request.prompt.len()).max(1);
        let limit = request.sampling.max_tokens.map_or(room, |max| max.min(room));
        let mut sampling = request.sampling;
        sampling.max_tokens = Some(limit);
        let seed = sampling.seed.unwrap_or_else(random_seed);
        // Capacity for one piece per token and the final one: the engine never waits for a slow reader.
        let (output, pieces) = mpsc::channel(limit + 2);
        let extras: Vec<&str> = request.extras.iter().map(String::as_str).collect();
        let sequence = Sequence::new(Start {
            id,
            chain: IdentityChain::new(self.shared.fingerprint, &extras),
            detokenizer: Detokenizer::new(
                self.shared.text.tokenizer.clone(),
                sampling.skip_special_tokens,
                &request.prompt,
            ),
            prompt: request.prompt,
            sampling,
            seed,
            extras: request.extras.clone(),
            goal: request.push_to.map_or(Goal::Generate, |transfer| Goal::Prefill { transfer }),
            retain_for: request.retain_for,
            remote: request.fetch_from.map(|(transfer, address)| RemotePrefill { transfer, address }),
            grammar: request.grammar,
            output,
        });
        if self.shared.stats.submitted.fetch_add(1, Ordering::Relaxed) >= SUBMITTED_MAX {
            self.shared.stats.submitted.fetch_sub(1, Ordering::Relaxed);
            return Err(SubmitError::Full);
        }
        match self.sender.send(Message::Submit(Box::new(sequence))) {
            Ok(()) => Ok(OutputStream { id, pieces, sender: self.sender.clone(), ended: false }),
            Err(_) => Err(SubmitError::Stopped),
        }
    }

    /// Whether the engine's thread runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.thread.0.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Drops every cached block that no request uses.
    pub fn clear_cache(&self) {
        let _stopped = self.sender.send(Message::ClearCache);
    }

    /// Stops the thread and waits for it. Requests in the engine are abandoned.
    pub fn stop(self) {
        let _stopped = self.sender.send(Message::Stop);
        if let Some(thread) = Arc::into_inner(self.thread).and_then(|joiner| joiner.0) {
            // A panic of the thread was printed by its hook.
            let _panicked = thread.join();
        }
    }
}

/// A number that differs from request to request and from process to process.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// Receiver of the pieces of one request. Dropping it cancels the request.
pub struct OutputStream {
    id: u64,
    pieces: mpsc::Receiver<Output>,
    sender: Sender<Message>,
    ended: bool,
}

impl OutputStream {
    /// Returns the next piece; `None` when the engine has stopped or the last piece was returned.
    pub async fn next(&mut self) -> Option<Output> {
        if self.ended {
            return None;
        }
        let piece = self.pieces.recv().await;
        self.ended = piece.as_ref().is_none_or(|piece| piece.finish.is_some());
        piece
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        if !self.ended {
            let _stopped = self.sender.send(Message::Cancel(self.id));
        }
    }
}
