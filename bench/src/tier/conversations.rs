//! Conversations with the reference engine, whose pool holds only a part of their blocks.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use dataplane_fabric::wait::ThreadPolicy;
use dataplane_memory::PageSize;
use dataplane_tcp::{TcpConfig, TcpFabric};
use kvstore_block::BlockLayout;
use kvstore_catalog::PolicyKind;
use kvstore_remote::{PoolConfig, PoolCounters, PoolNode, PoolServer, PoolService, RemoteConfig};
use kvstore_store::far::remote::{RemoteTier, RemoteTierConfig};
use kvstore_store::{HostTier, RecoveredBlock, Store, StoreBuilder, StoreConfig, StoreEvent, StorePool};
use router_openai::CompletionRequest;
use router_tokens::ModelText;
use tokio::sync::Semaphore;
use tools_engine::model::Model;
use tools_engine::{Engine, EngineConfig, EngineHandle, KvPool, Request, Services};

use super::files::{Scratch, disk};
use crate::measure::Latencies;
use crate::results::{self, Better};

const BLOCK_TOKENS: usize = 16;
const VOCABULARY: u64 = 256;

/// The conversations.
#[derive(Args, Clone)]
pub(crate) struct ConversationArgs {
    /// Users, each with a conversation.
    #[arg(long, default_value_t = 40)]
    users: usize,
    /// Turns of each conversation.
    #[arg(long, default_value_t = 4)]
    turns: usize,
    /// Tokens of a first question; later ones have a quarter of it.
    #[arg(long, default_value_t = 600)]
    tokens: usize,
    /// Tokens of an answer.
    #[arg(long, default_value_t = 16)]
    answer: usize,
    /// Requests in the engine at a time.
    #[arg(long, default_value_t = 4)]
    inside: usize,
    /// Threads of the engine; 0 is one for each core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Folder for the disk tier's files; default: the system's folder for temporary files.
    #[arg(long)]
    folder: Option<PathBuf>,
}

impl Default for ConversationArgs {
    fn default() -> Self {
        Self { users: 40, turns: 4, tokens: 600, answer: 16, inside: 4, threads: 0, folder: None }
    }
}

/// Tiers behind the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tiers {
    None,
    Host,
    Disk,
    Remote,
}

impl Tiers {
    const ALL: [Self; 4] = [Self::None, Self::Host, Self::Disk, Self::Remote];

    fn name(self) -> &'static str {
        match self {
            Self::None => "no tier",
            Self::Host => "host",
            Self::Disk => "host + disk",
            Self::Remote => "host + disk + remote",
        }
    }
}

struct Outcome {
    first_token: Latencies,
    tokens_per_s: f64,
    cached: f64,
    answers: u64,
    line: String,
}

pub(crate) fn run(smoke: bool, args: &ConversationArgs) -> Result<()> {
    let mut args = args.clone();
    if smoke {
        (args.users, args.turns, args.tokens, args.answer) = (6, 2, 96, 4);
    }
    let longest = args.tokens + (args.turns - 1) * (args.tokens / 4 + args.answer) + args.answer;
    let all_blocks = args.users * longest.div_ceil(BLOCK_TOKENS);
    println!(
        "# tier conversations: {} users, {} turns, up to {longest} tokens each; the pool holds a quarter of {all_blocks} \
         blocks; {} requests inside at a time",
        args.users, args.turns, args.inside
    );
    println!("tiers | TTFT p50 ms | p90 ms | tokens/s | prompt tokens from a cache | what the tiers did");
    let mut answers = None;
    for tiers in Tiers::ALL {
        let outcome = converse(&args, tiers, all_blocks)?;
        println!(
            "{} | {:.1} | {:.1} | {:.0} | {:.0} % | {}",
            tiers.name(),
            outcome.first_token.at(0.5) / 1e6,
            outcome.first_token.at(0.9) / 1e6,
            outcome.tokens_per_s,
            outcome.cached * 100.0,
            outcome.line
        );
        let row = |what: &str| format!("conversations, {}: {what}", tiers.name());
        results::add_latencies("tier", &row("time to first token"), &outcome.first_token);
        results::add("tier", &row("output"), ("tokens/s", Better::Higher), &[outcome.tokens_per_s]);
        results::add("tier", &row("prompt from a cache"), ("share", Better::Higher), &[outcome.cached]);
        let expected = *answers.get_or_insert(outcome.answers);
        ensure!(
            outcome.answers == expected,
            "the answers with {} differ from those without tiers",
            tiers.name()
        );
    }
    println!("answers equal in all");
    Ok(())
}

fn converse(args: &ConversationArgs, tiers: Tiers, all_blocks: usize) -> Result<Outcome> {
    let model = Model::tiny(7);
    let layout = KvPool::layout_of(model.config(), BLOCK_TOKENS)?;
    // The blocks of requests in the engine must fit as well.
    let least = (args.inside + 1) * all_blocks.div_ceil(args.users);
    let kv = KvPool::new(layout, (all_blocks / 4).max(least), PageSize::HugeIfAvailable)?;
    let engine = Engine::new();
    let folder = Scratch::new(&args.folder.clone().unwrap_or_else(std::env::temp_dir))?;
    let inbox = engine.inbox();
    let notify = move |moved| inbox.store_moved(moved);
    let mut behind = TierStack::default();
    let services = match tiers {
        Tiers::None => Services::default(),
        _ => {
            let (store, survivors) =
                behind.build(tiers, &layout, all_blocks as u32, folder.path(), notify)?;
            behind.store = Some(Arc::clone(&store));
            Services { store: Some(store), survivors, ..Services::default() }
        }
    };
    let threads = match args.threads {
        0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        threads => threads,
    };
    let config = EngineConfig {
        batch_tokens_max: 512,
        sequences_max: args.inside,
        waiting_max: args.users,
        context_tokens: model.config().context_tokens,
        threads,
        transfer_deadline: Duration::from_secs(10),
        offload_at_once: true,
        event_tokens: false,
    };
    let handle = engine.start(config, model, ModelText::tiny()?, kv, services)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let started = Instant::now();
    let done = runtime.block_on(all_users(args, &handle))?;
    let elapsed = started.elapsed();
    handle.stop();
    let line = behind.line();
    drop(behind);
    let mut first_token = Latencies::new()?;
    let mut hasher = DefaultHasher::new();
    let (mut tokens, mut prompts, mut cached) = (0, 0, 0);
    for user in &done {
        user.answers.hash(&mut hasher);
        user.first_tokens.iter().for_each(|&time| first_token.record(time));
        tokens += user.answers.len();
        prompts += user.prompt_tokens;
        cached += user.cached_tokens;
    }
    Ok(Outcome {
        first_token,
        tokens_per_s: tokens as f64 / elapsed.as_secs_f64(),
        cached: cached as f64 / prompts as f64,
        answers: hasher.finish(),
        line,
    })
}

#[derive(Default)]
struct User {
    answers: Vec<u32>,
    first_tokens: Vec<Duration>,
    prompt_tokens: usize,
    cached_tokens: usize,
}

/// Every user asks, then every user asks again: before a user's second question the pool has held all the others.
async fn all_users(args: &ConversationArgs, engine: &EngineHandle) -> Result<Vec<User>> {
    let mut users: Vec<(Vec<u32>, User)> = (0..args.users).map(|_| (Vec::new(), User::default())).collect();
    let inside = Arc::new(Semaphore::new(args.inside));
    for turn in 0..args.turns {
        let mut asked = Vec::with_capacity(users.len());
        for (number, (mut history, mut user)) in users.into_iter().enumerate() {
            let (args, engine, inside) = (args.clone(), engine.clone(), Arc::clone(&inside));
            asked.push(tokio::spawn(async move {
                let _permit = inside.acquire().await?;
                let count = if turn == 0 { args.tokens } else { args.tokens / 4 };
                let seed = (number * args.turns + turn) as u64;
                history.extend((0..count as u64).map(|at| word(seed, at)));
                ask(&engine, &args, &mut history, &mut user).await?;
                anyhow::Ok((history, user))
            }));
        }
        users = Vec::with_capacity(asked.len());
        for user in asked {
            users.push(user.await??);
        }
    }
    Ok(users.into_iter().map(|(_, user)| user).collect())
}

async fn ask(
    engine: &EngineHandle,
    args: &ConversationArgs,
    history: &mut Vec<u32>,
    user: &mut User,
) -> Result<()> {
    let body = format!(
        r#"{{"model":"x","prompt":[1],"temperature":0,"max_tokens":{},"ignore_eos":true}}"#,
        args.answer
    );
    let request = Request {
        prompt: history.clone(),
        sampling: CompletionRequest::parse(body.as_bytes())?.sampling,
        extras: Vec::new(),
        push_to: None,
        fetch_from: None,
        retain_for: Duration::ZERO,
        grammar: None,
    };
    user.prompt_tokens += history.len();
    let started = Instant::now();
    let mut generation = engine.submit(request)?;
    let mut is_first = true;
    while let Some(piece) = generation.next().await {
        if is_first && !piece.tokens.is_empty() {
            is_first = false;
            user.first_tokens.push(started.elapsed());
            user.cached_tokens += piece.cached_tokens;
        }
        history.extend(&piece.tokens);
        user.answers.extend(&piece.tokens);
    }
    ensure!(!is_first, "the engine gave no answer");
    Ok(())
}

/// Words that are equal in every run, and different for every turn.
fn word(seed: u64, at: u64) -> u32 {
    let mixed = (seed << 32 | at).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((mixed >> 40) % VOCABULARY) as u32
}

/// The tiers' parts, which live as long as a run.
#[derive(Default)]
struct TierStack {
    store: Option<Arc<Store>>,
    pool: Option<PoolService>,
}

impl TierStack {
    fn build(
        &mut self,
        tiers: Tiers,
        layout: &BlockLayout,
        all: u32,
        folder: &Path,
        notify: impl FnMut(StoreEvent) + Send + 'static,
    ) -> Result<(Arc<Store>, Vec<RecoveredBlock>)> {
        let block_bytes = layout.block_bytes();
        // The more tiers there are, the less each faster one holds.
        let host_slots = match tiers {
            Tiers::None | Tiers::Host => all + all / 8,
            Tiers::Disk => all / 4,
            Tiers::Remote => all / 8,
        };
        let host =
            HostTier { slots: host_slots, pages: PageSize::HugeIfAvailable, eviction: PolicyKind::Lru };
        let mut builder = StoreBuilder::new(StoreConfig::new(block_bytes, BLOCK_TOKENS as u32), host)?;
        if matches!(tiers, Tiers::Disk | Tiers::Remote) {
            let slots = if tiers == Tiers::Disk { all + all / 8 } else { all / 4 };
            let bytes = u64::from(slots) * block_bytes.next_multiple_of(4096) as u64 * 17 / 16 + (1 << 20);
            builder = builder.disk(disk(folder, block_bytes, bytes.next_multiple_of(4096)));
        }
        if tiers == Tiers::Remote {
            let host = HostTier {
                slots: all + all / 8,
                pages: PageSize::HugeIfAvailable,
                eviction: PolicyKind::Lru,
            };
            let of_pool = StoreBuilder::new(StoreConfig::new(block_bytes, BLOCK_TOKENS as u32), host)?;
            let (store, _) = of_pool.start(|_| {})?;
            let store = Arc::new(store);
            let listen = "127.0.0.1:0".parse()?;
            let fabric = TcpFabric::new(Arc::clone(store.slab()), Some(listen), TcpConfig::default())?;
            let address = fabric.listening_on().context("the pool listens")?.to_string();
            let counters = Arc::new(PoolCounters::default());
            let server = PoolServer::new(fabric, StorePool::new(store), PoolConfig::default(), counters)?;
            self.pool = Some(PoolService::start(server, ThreadPolicy::default())?);
            let fabric = TcpFabric::new(Arc::clone(builder.slab()), None, TcpConfig::default())?;
            let config = RemoteTierConfig {
                nodes: vec![PoolNode { name: "node".to_owned(), address }],
                group: RemoteConfig::default().group_blocks as u32,
                replicas: 2,
                deadline: Duration::from_secs(2),
                fingerprint: layout.fingerprint(),
                maps: false,
            };
            let (tier, _counters) = RemoteTier::open(&config, fabric, &builder, ThreadPolicy::default())?;
            builder = builder.other(Box::new(tier));
        }
        let (store, survivors) = builder.start(notify)?;
        Ok((Arc::new(store), survivors))
    }

    fn line(&self) -> String {
        let Some(store) = &self.store else { return String::new() };
        let wanted = [
            "onboarded_blocks",
            "disk_read_blocks",
            "disk_written_blocks",
            "far_read_blocks",
            "checksum_failures",
        ];
        let counters = store.counters().snapshot();
        let shown = counters.iter().filter(|(name, ..)| wanted.contains(name));
        shown.map(|(name, _, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
    }
}
