//! Continuous batching over paged blocks: selects the requests of each step, and manages their blocks.
//!
//! A request waits, may fetch blocks (from another worker, or from the store's tiers), runs until it is finished, and may be
//! preempted in between when blocks run out; then it starts over, with the part of its prefix that is still cached. In a
//! step, every request that generates gets its one token first; the rest of the token budget goes to prompts, first come
//! first served, in chunks.
//!
//! Everything runs on one thread. Blocks are held by reference: a block of the catalog without other references can be
//! evicted, any other cannot, so no separate record of users is needed.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::SlotRef;
use dataplane_transfer::{Command, Notice, Outcome, TransferService};
use kvstore_store::{Onboard, Plan, Prepare, Prompt, RemoteCoverage, StoreEvent};
use router_openai::Finish;
use router_tokens::ModelText;
use tools_grammar::StepError;

use crate::blocks::Blocks;
use crate::engine::{Output, Services};
use crate::events::EventSink;
use crate::model::{Item, Model, Rows};
use crate::sampler::choose;
use crate::sequence::{Goal, RemotePrefill, Sequence};
use crate::{EngineConfig, EngineStats, KvPool};

/// Interval at which cached slots that no request uses are counted while requests run.
pub(crate) const EVICTABLE_EVERY: Duration = Duration::from_millis(100);

pub(crate) struct Scheduler {
    config: EngineConfig,
    model: Model,
    text: ModelText,
    blocks: Blocks,
    transfer: Option<TransferService>,
    sink: Option<EventSink>,
    stats: Arc<EngineStats>,
    waiting: VecDeque<Sequence>,
    /// Sequences that wait for blocks of another worker, by transfer.
    fetching_remote: HashMap<u64, Sequence>,
    /// Prompts that are computed and not yet handed over, by transfer. Their requests end with the hand-over; until then a
    /// client's disconnect cancels them.
    handing_over: HashMap<u64, Sequence>,
    /// Sequences that wait for blocks of the store's tiers, by sequence.
    fetching_store: HashMap<u64, Sequence>,
    running: Vec<Sequence>,
    /// Whether the last step computed nothing although requests run.
    is_stalled: bool,
    evictable_counted: Instant,
}

/// Result of trying to fetch a sequence's blocks.
enum Fetch {
    /// There is nothing to fetch, or not now; the sequence can run.
    Unneeded(Box<Sequence>),
    /// The fetch has started; the sequence returns when its blocks have arrived.
    Started,
    /// There are no slots for the blocks to fetch; the sequence has to wait.
    NoRoom(Box<Sequence>),
}

/// Part of a running sequence that is computed in the present step.
struct Scheduled {
    index: usize,
    count: usize,
}

impl Scheduler {
    pub(crate) fn new(
        config: EngineConfig,
        model: Model,
        text: ModelText,
        kv: KvPool,
        services: Services,
        stats: Arc<EngineStats>,
    ) -> Self {
        let Services { transfer, store, survivors, events: sink } = services;
        let mut blocks = Blocks::new(kv, store, config.offload_at_once, config.event_tokens);
        blocks.publish_recovered(survivors);
        Self {
            config,
            model,
            text,
            blocks,
            transfer,
            sink,
            stats,
            waiting: VecDeque::new(),
            fetching_remote: HashMap::new(),
            handing_over: HashMap::new(),
            fetching_store: HashMap::new(),
            running: Vec::new(),
            is_stalled: false,
            evictable_counted: Instant::now(),
        }
    }

    pub(crate) fn has_work(&self) -> bool {
        !self.running.is_empty() && !self.is_stalled
    }

    /// Whether requests wait that only an external event can let run.
    pub(crate) fn is_blocked(&self) -> bool {
        self.is_stalled || !self.waiting.is_empty()
    }

    // --- messages ---

    /// Counts a submitted request that was taken out of the inbox.
    pub(crate) fn taken(&self) {
        self.stats.submitted.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
    }

    pub(crate) fn submit(&mut self, mut sequence: Sequence) {
        if self.waiting.len() >= self.config.waiting_max {
            self.drop_legs(&sequence);
            sequence.finish(Finish::Abort);
            return;
        }
        EngineStats::add(&self.stats.prompt_tokens, sequence.prompt_len);
        if let Some(store) = &self.blocks.store {
            let block_tokens = self.blocks.kv.block_tokens();
            let wanted = sequence.reusable_blocks(block_tokens);
            sequence.identify(wanted, block_tokens);
            store.prompt_arrived(&sequence.identities[..wanted]);
        }
        self.waiting.push_back(sequence);
    }

    pub(crate) fn cancel(&mut self, id: u64) {
        let waiting = self.waiting.iter().position(|sequence| sequence.id == id);
        let running = self.running.iter().position(|sequence| sequence.id == id);
        let remote = self.fetching_remote.iter().find(|(_, sequence)| sequence.id == id).map(|(&key, _)| key);
        let leaving = self.handing_over.iter().find(|(_, sequence)| sequence.id == id).map(|(&key, _)| key);
        let sequence = match (waiting, running, remote.or(leaving)) {
            (Some(at), _, _) => self.waiting.remove(at),
            (_, Some(at), _) => Some(self.running.remove(at)),
            (_, _, Some(transfer)) if leaving.is_some() => self.handing_over.remove(&transfer),
            (_, _, Some(transfer)) => self.fetching_remote.remove(&transfer).inspect(|_| {
                self.command(Command::Cancel { transfer });
            }),
            _ => self.fetching_store.remove(&id).inspect(|_| {
                if let Some(store) = &self.blocks.store {
                    store.cancel(id);
                }
            }),
        };
        let Some(sequence) = sequence else { return };
        self.drop_legs(&sequence);
        EngineStats::add(&self.stats.cancelled, 1);
        self.blocks.catalog.touch(&sequence.identities[..sequence.registered]);
    }

    /// Notifies the other leg's worker, through the data plane, that this leg was dropped.
    fn drop_legs(&self, sequence: &Sequence) {
        if let Goal::Prefill { transfer } = sequence.goal {
            self.command(Command::Cancel { transfer });
        } else if let Some(remote) = sequence.remote.clone().filter(|remote| !self.is_expected(remote)) {
            self.command(Command::Decline { transfer: remote.transfer, address: remote.address });
        }
    }

    /// Whether another request waits for this transfer already. Its sender must not be notified of this one: it would stop.
    fn is_expected(&self, remote: &RemotePrefill) -> bool {
        self.fetching_remote.contains_key(&remote.transfer)
    }

    pub(crate) fn transfer_notice(&mut self, notice: Notice) {
        let (transfer, slots, outcome) = match notice {
            Notice::Arrived { transfer, slots, outcome } => (transfer, slots, outcome),
            Notice::Pushed { transfer, .. } => return self.handed_over(transfer),
            // The engine starts no moves of its own.
        };
        let Some(mut sequence) = self.fetching_remote.remove(&transfer) else { return };
        if outcome != Outcome::Complete {
            let wanted = sequence.reusable_blocks(self.blocks.kv.block_tokens());
            let missing = wanted.saturating_sub(sequence.table.len() + slots.len());
            EngineStats::add(&self.stats.recomputed_blocks, missing);
            tracing::info!(transfer, ?outcome, missing, "blocks did not arrive; computing them here");
        }
        self.blocks.adopt(&mut sequence, slots);
        self.running.push(sequence);
    }

    /// Ends the request of a transfer that this worker pushed and that has ended, even if it is still being computed: the decode
    /// worker does not need it any more.
    fn handed_over(&mut self, transfer: u64) {
        let is_it = |sequence: &Sequence| sequence.goal == Goal::Prefill { transfer };
        let sequence = match self.handing_over.remove(&transfer) {
            Some(sequence) => Some(sequence),
            None => self.take_prefill(is_it),
        };
        if let Some(mut sequence) = sequence {
            sequence.finish(Finish::Length);
            self.finished(&sequence);
        }
    }

    fn take_prefill(&mut self, is_it: impl Fn(&Sequence) -> bool) -> Option<Sequence> {
        if let Some(at) = self.running.iter().position(&is_it) {
            return Some(self.running.remove(at));
        }
        if let Some(at) = self.waiting.iter().position(&is_it) {
            return self.waiting.remove(at);
        }
        let id = self.fetching_store.iter().find(|(_, sequence)| is_it(sequence)).map(|(&id, _)| id)?;
        self.fetching_store.remove(&id)
    }

    pub(crate) fn store_moved(&mut self, moved: StoreEvent) {
        match moved {
            StoreEvent::Stored { identity, medium } => self.blocks.stored(identity, medium),
            StoreEvent::Removed { identity, medium } => self.blocks.removed(identity, medium),
            StoreEvent::Offloaded { identity } => self.blocks.offloaded(identity),
            StoreEvent::Prepared { request, blocks: _ } => {
                // The fetched blocks are in host memory now, and found there when the request is admitted again.
                let Some(sequence) = self.fetching_store.remove(&request) else { return };
                self.waiting.push_front(sequence);
            }
            StoreEvent::Onboarded { request, mut slots, verified } => {
                let Some(mut sequence) = self.fetching_store.remove(&request) else { return };
                slots.truncate(verified);
                if !sequence.was_preempted {
                    sequence.cached_tokens += verified * self.blocks.kv.block_tokens();
                }
                EngineStats::add(&self.stats.prefix_hits, verified * self.blocks.kv.block_tokens());
                self.blocks.adopt(&mut sequence, slots);
                self.running.push(sequence);
            }
        }
    }

    pub(crate) fn clear_cache(&mut self) {
        self.blocks.clear();
        self.publish();
    }

    fn command(&self, command: Command) {
        let Some(transfer) = &self.transfer else { return };
        let mut command = command;
        // The transfer thread always drains its queue, so this loop ends soon.
        while let Err(back) = transfer.submit(command) {
            assert!(!transfer.has_stopped(), "the transfer thread has ended: its panic is above");
            command = back;
            std::thread::yield_now();
        }
    }

    // --- admission ---

    /// Moves waiting requests to running, or to fetching, as long as there is room.
    fn admit(&mut self) {
        while let Some(mut sequence) = self.waiting.pop_front() {
            let fetching = self.fetching_remote.len() + self.fetching_store.len();
            let inside = self.running.len() + fetching + self.handing_over.len();
            if inside >= self.config.sequences_max {
                self.waiting.push_front(sequence);
                return;
            }
            let block_tokens = self.blocks.kv.block_tokens();
            let wanted = sequence.reusable_blocks(block_tokens);
            sequence.identify(wanted, block_tokens);
            sequence.table.clear();
            let found = self.blocks.catalog.match_prefix(&sequence.identities[..wanted], &mut sequence.table);
            sequence.computed = found * block_tokens;
            sequence.registered = found;
            if sequence.generated() == 0 && !sequence.was_preempted {
                sequence.cached_tokens = sequence.computed;
            }
            let (prompt_len, hits) = (sequence.prompt_len, sequence.computed);
            let is_first = !sequence.remote_lookup_done;
            match self.fetch(sequence, wanted) {
                Fetch::Started => {}
                Fetch::Unneeded(sequence) => self.running.push(*sequence),
                Fetch::NoRoom(mut sequence) => {
                    let is_alone = self.running.is_empty()
                        && self.fetching_remote.is_empty()
                        && self.fetching_store.is_empty();
                    if is_alone {
                        // No running request would free enough slots (a peer may hold slots in quarantine): the prompt is computed here, in the
                        // available slots.
                        self.drop_legs(&sequence);
                        sequence.remote = None;
                    }
                    self.waiting.push_front(*sequence);
                    if !is_alone {
                        return;
                    }
                    continue;
                }
            }
            if is_first {
                EngineStats::add(&self.stats.prefix_queries, prompt_len);
                EngineStats::add(&self.stats.prefix_hits, hits);
            }
        }
    }

    /// Starts a fetch if another worker or the store may have blocks.
    fn fetch(&mut self, mut sequence: Sequence, wanted: usize) -> Fetch {
        let found = sequence.table.len();
        if let Some(remote) = sequence.remote.take().filter(|remote| !self.is_expected(remote)) {
            if found >= wanted {
                self.command(Command::Decline { transfer: remote.transfer, address: remote.address });
                return Fetch::Unneeded(Box::new(sequence));
            }
            let Some(slots) = self.blocks.acquire_many(wanted - found) else {
                sequence.remote = Some(remote);
                sequence.table.clear();
                return Fetch::NoRoom(Box::new(sequence));
            };
            self.command(Command::Expect {
                transfer: remote.transfer,
                address: remote.address,
                content: sequence.content(),
                first_block: found as u32,
                slots,
                deadline: Instant::now() + self.config.transfer_deadline,
            });
            self.fetching_remote.insert(remote.transfer, sequence);
            return Fetch::Started;
        }
        let Some(store) = self.blocks.store.clone().filter(|_| !sequence.store_fetch_tried && found < wanted)
        else {
            return Fetch::Unneeded(Box::new(sequence));
        };
        let prompt = Prompt {
            chain: &sequence.identities[found..wanted],
            groups: &[],
            device_blocks: found,
            tokens: sequence.tokens.len(),
            block_tokens: self.blocks.kv.block_tokens(),
            queued_tokens: self.queued_tokens(),
        };
        let request = sequence.id;
        let others =
            if sequence.remote_lookup_done { RemoteCoverage::Asked } else { RemoteCoverage::Unknown };
        let (blocks, deadline) = match store.plan(&prompt, others) {
            Plan::Recompute => (0, Instant::now()),
            Plan::Onboard { blocks, deadline } => (blocks, deadline),
            Plan::AskOthers { deadline } => {
                sequence.remote_lookup_done = true;
                let chain = sequence.identities[..wanted].to_vec();
                let tenant = sequence.tenant();
                let metas = self.blocks.metas(&sequence, found..wanted);
                let prepare = Prepare { request, chain, device_blocks: found, metas, tenant, deadline };
                if store.prepare(prepare).is_err() {
                    return Fetch::Unneeded(Box::new(sequence));
                }
                // The sequence is admitted again when the answers have arrived; until then it holds no slots.
                sequence.release_blocks();
                self.fetching_store.insert(request, sequence);
                return Fetch::Started;
            }
        };
        sequence.store_fetch_tried = true;
        // Without free slots there is no fetch: computing needs the present ones anyway.
        let Some(targets) = self.blocks.acquire_many(blocks).filter(|targets| !targets.is_empty()) else {
            return Fetch::Unneeded(Box::new(sequence));
        };
        let chain = sequence.identities[found..found + blocks].to_vec();
        if store.onboard(Onboard { request, chain, first: found as u32, targets, deadline }).is_err() {
            return Fetch::Unneeded(Box::new(sequence));
        }
        self.fetching_store.insert(request, sequence);
        Fetch::Started
    }

    /// Prompt tokens that the running requests have not computed yet.
    fn queued_tokens(&self) -> u64 {
        let block_tokens = self.blocks.kv.block_tokens();
        let left = |sequence: &Sequence| sequence.target(block_tokens).saturating_sub(sequence.computed);
        self.running.iter().map(left).filter(|&left| left > 1).sum::<usize>() as u64
    }

    // --- steps ---

    /// Admits requests, computes one batch, and publishes the changes.
    pub(crate) fn step(&mut self) {
        self.admit();
        let started = Instant::now();
        let scheduled = self.schedule();
        // All slots are in use by transfers, which end on their own thread. Most send a message then; the rest is found by the recheck.
        self.is_stalled = scheduled.is_empty() && !self.running.is_empty();
        if !scheduled.is_empty() {
            self.compute(&scheduled);
            self.stats.step.observe(started.elapsed());
        }
        self.finish_prefills();
        self.publish();
    }

    fn schedule(&mut self) -> Vec<Scheduled> {
        let mut budget = self.config.batch_tokens_max;
        let mut scheduled: Vec<Scheduled> = Vec::new();
        let block_tokens = self.blocks.kv.block_tokens();
        for generating in [true, false] {
            let mut index = 0;
            while index < self.running.len() && budget > 0 {
                let sequence = &self.running[index];
                let left = sequence.target(block_tokens).saturating_sub(sequence.computed);
                let wanted = (left == 1) == generating && left > 0;
                if wanted && !scheduled.iter().any(|other| other.index == index) {
                    let count = left.min(budget);
                    if self.make_room(index, count, &scheduled) {
                        budget -= count;
                        scheduled.push(Scheduled { index, count });
                    }
                }
                index += 1;
            }
        }
        scheduled
    }

    /// Gives a sequence the blocks for `count` more tokens, preempting younger sequences if necessary. False when it has to wait.
    fn make_room(&mut self, index: usize, count: usize, scheduled: &[Scheduled]) -> bool {
        let needed = (self.running[index].computed + count).div_ceil(self.blocks.kv.block_tokens());
        while self.running[index].table.len() < needed {
            if let Some(slot) = self.blocks.acquire() {
                self.running[index].table.push(slot);
                continue;
            }
            let youngest = self.running.len() - 1;
            if youngest == index || scheduled.iter().any(|other| other.index == youngest) {
                return false;
            }
            let mut victim = self.running.remove(youngest);
            self.blocks.catalog.touch(&victim.identities[..victim.registered]);
            victim.release_blocks();
            victim.was_preempted = true;
            EngineStats::add(&self.stats.preemptions, 1);
            self.waiting.push_front(victim);
        }
        true
    }

    fn compute(&mut self, scheduled: &[Scheduled]) {
        let block_tokens = self.blocks.kv.block_tokens();
        let mut running = std::mem::take(&mut self.running);
        let mut pushes: Vec<(u64, [u8; 16], usize, Vec<SlotRef>)> = Vec::new();
        let mut items = Vec::with_capacity(scheduled.len());
        for part in scheduled {
            let sequence = &running[part.index];
            let end = sequence.computed + part.count;
            if let Goal::Prefill { transfer } = sequence.goal {
                let complete = end / block_tokens;
                if sequence.pushed < complete {
                    let slots = sequence.table[sequence.pushed..complete].to_vec();
                    pushes.push((transfer, sequence.content(), sequence.pushed, slots));
                }
            }
            let generates = sequence.goal == Goal::Generate && end == sequence.tokens.len();
            items.push(Item {
                tokens: &sequence.tokens[sequence.computed..end],
                start: sequence.computed,
                table: sequence.table.iter().map(SlotRef::slot).collect(),
                rows: if generates { Rows::Last } else { Rows::None },
            });
        }
        // The measured cost of computing decides whether fetching from a tier is worth it.
        let prompt_tokens: usize = scheduled.iter().map(|part| part.count).filter(|&count| count > 1).sum();
        let context = items.iter().map(|item| item.start).max().unwrap_or(0);
        let started = Instant::now();
        let logits = self.model.forward(&self.blocks.kv, &items, |layer| {
            for (transfer, content, first, slots) in &pushes {
                self.command(Command::Push {
                    transfer: *transfer,
                    content: *content,
                    first_block: *first as u32,
                    slots: slots.clone(),
                    layers: layer as u16..layer as u16 + 1,
                });
            }
        });
        drop(items);
        if let Some(store) = self.blocks.store.as_ref().filter(|_| prompt_tokens >= block_tokens) {
            store.observe_prefill(prompt_tokens, context, started.elapsed());
        }
        let mut rows = logits.chunks_exact(self.model.config().vocabulary);
        let mut finished = Vec::new();
        for part in scheduled {
            let sequence = &mut running[part.index];
            sequence.computed += part.count;
            if matches!(sequence.goal, Goal::Prefill { .. }) {
                sequence.pushed = sequence.pushed.max(sequence.computed / block_tokens);
            }
            self.blocks.register(sequence);
            let generates = sequence.goal == Goal::Generate && sequence.computed == sequence.tokens.len();
            let row = if generates { rows.next() } else { None };
            if row.is_some_and(|row| self.draw(sequence, row)) {
                finished.push(part.index);
            }
        }
        finished.sort_unstable();
        for index in finished.into_iter().rev() {
            let sequence = running.remove(index);
            self.finished(&sequence);
        }
        self.running = running;
    }

    /// Ends a sequence. Its blocks stay in the catalog, since a conversation may continue.
    fn finished(&mut self, sequence: &Sequence) {
        let known = &sequence.identities[..sequence.registered];
        self.blocks.catalog.touch(known);
        if let Some(store) = &self.blocks.store {
            store.mark_conversation_idle(known);
            if !sequence.retain_for.is_zero() {
                // The retention is a hint: the store counts requests that it does not accept.
                let _full = store.retain(known, sequence.retain_for);
            }
        }
        EngineStats::add(&self.stats.finished, 1);
    }

    /// Draws the next token; true when the sequence is finished.
    fn draw(&self, sequence: &mut Sequence, logits: &[f32]) -> bool {
        let mut logits = Cow::Borrowed(logits);
        if let Some(grammar) = &mut sequence.grammar
            && let Err(error) = grammar.mask(logits.to_mut())
        {
            cut_off(sequence, &error);
            return true;
        }
        let (prompt, output) = sequence.tokens.split_at(sequence.output_start());
        let ends: Vec<u32> = match sequence.sampling.ignore_eos {
            true => sequence.sampling.stop_token_ids.clone(),
            false => self.text.eos_ids.iter().chain(&sequence.sampling.stop_token_ids).copied().collect(),
        };
        let too_short = output.len() < sequence.sampling.min_tokens;
        let suppressed = &self.model.config().suppressed;
        let banned = if too_short { ends.as_slice() } else { &[] };
        let choice = choose(&logits, &sequence.sampling, sequence.seed, prompt, output, suppressed, banned);
        let token = choice.token;
        let ended = ends.contains(&token) && !too_short;
        let complete = match sequence.grammar.as_mut().filter(|_| !ended).map(|grammar| grammar.accept(token))
        {
            None => false,
            Some(Ok(complete)) => complete,
            Some(Err(error)) => {
                cut_off(sequence, &error);
                return true;
            }
        };
        sequence.tokens.push(token);
        EngineStats::add(&self.stats.generation_tokens, 1);
        let now = Instant::now();
        match sequence.last_token.replace(now) {
            None => self.stats.time_to_first_token.observe(now - sequence.arrived),
            Some(before) => self.stats.inter_token.observe(now - before),
        }
        let text = if ended { String::new() } else { sequence.detokenizer.push(token) };
        let (text, stopped) = sequence.stop.push(&text);
        let out_of_room = Some(sequence.generated()) == sequence.sampling.max_tokens;
        let choice = sequence.sampling.logprobs.map(|_| choice);
        let cached_tokens = sequence.cached_tokens;
        sequence.send(Output { tokens: vec![token], text, choice, finish: None, cached_tokens });
        if stopped {
            sequence.send(Output { finish: Some(Finish::Stop), cached_tokens, ..Output::default() });
        } else if ended || complete {
            sequence.finish(Finish::Stop);
        } else if out_of_room {
            sequence.finish(Finish::Length);
        }
        stopped || ended || complete || out_of_room
    }

    /// Pushes computed blocks of prefill requests and ends those that are complete.
    fn finish_prefills(&mut self) {
        let block_tokens = self.blocks.kv.block_tokens();
        let layers = self.model.config().layers as u16;
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            let Goal::Prefill { transfer } = sequence.goal else {
                index += 1;
                continue;
            };
            let (ready, content) = (sequence.computed / block_tokens, sequence.content());
            let (first, slots) =
                (sequence.pushed, sequence.table[sequence.pushed.min(ready)..ready].to_vec());
            sequence.pushed = sequence.pushed.max(ready);
            let done = sequence.computed >= sequence.target(block_tokens);
            if !slots.is_empty() {
                let (first_block, layers) = (first as u32, 0..layers);
                self.command(Command::Push { transfer, content, first_block, slots, layers });
            }
            if !done {
                index += 1;
                continue;
            }
            let mut sequence = self.running.remove(index);
            // The transfer layer holds references to the blocks now.
            sequence.table.clear();
            self.handing_over.insert(transfer, sequence);
            self.command(Command::PushEnd { transfer });
        }
    }

    fn publish(&mut self) {
        if let Some(sink) = &mut self.sink {
            sink.publish(&mut self.blocks.events);
        }
        self.blocks.events.clear();
        EngineStats::set(&self.stats.running, self.running.len());
        EngineStats::set(&self.stats.waiting, self.waiting.len());
        EngineStats::set(
            &self.stats.fetching,
            self.fetching_remote.len() + self.fetching_store.len() + self.handing_over.len(),
        );
        EngineStats::set(&self.stats.slots_cached, self.blocks.catalog.len());
        // `evictable` walks the whole catalog.
        if self.running.is_empty() || self.evictable_counted.elapsed() >= EVICTABLE_EVERY {
            EngineStats::set(&self.stats.slots_evictable, self.blocks.catalog.evictable(usize::MAX));
            self.evictable_counted = Instant::now();
        }
    }
}

/// Ends an output whose grammar reached a limit of its compiler. The reason is `Length` and not `Abort`: the engine is healthy,
/// and another one would reach the same limit.
fn cut_off(sequence: &mut Sequence, error: &StepError) {
    tracing::warn!(%error, tokens = sequence.generated(), "the grammar of an output reached a limit: cut off");
    sequence.finish(Finish::Length);
}
