//! Parts that both sides of the soak have in common, and the peer process.

use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use dataplane_fabric::Fabric;
use dataplane_fabric::auth::SharedKey;
use dataplane_fabric::wait::ThreadPolicy;
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_shm::{ShmConfig, ShmFabric};
use dataplane_tcp::{TcpConfig, TcpFabric};
use dataplane_transfer::{
    Bond, BondConfig, BondCounters, Command, HeadRange, Limits, Notice, PieceLayout, Rail, TransferCounters,
    TransferNode, TransferService,
};
use dataplane_verbs::{Device, Library, VerbsConfig, VerbsFabric};

pub(crate) const LAYERS: u16 = 8;
pub(crate) const SLOT_BYTES: usize = 64 << 10;
/// All heads of the model.
pub(crate) const HEADS: HeadRange = HeadRange { first: 0, count: 4 };
/// Layout of the worker's blocks.
pub(crate) const LAYOUT: PieceLayout =
    PieceLayout { layers: LAYERS, rows: 16, heads: HEADS, head_bytes: 128, fingerprint: 1 };
const SLOTS: u32 = 256;
/// Environment variable with the secret of a run.
pub(crate) const SECRET: &str = "KVASIR_SOAK_SECRET";

pub(crate) struct Node {
    pub(crate) pool: Arc<SlotPool>,
    pub(crate) service: TransferService,
    pub(crate) counters: Arc<TransferCounters>,
    pub(crate) links: Arc<BondCounters>,
    pub(crate) address: String,
}

impl Node {
    pub(crate) fn new(
        transports: &str,
        socket: &Path,
        heads: HeadRange,
        seed: u64,
        key: &SharedKey,
        notify: impl FnMut(Notice) + Send + 'static,
    ) -> Result<Self> {
        let pieces = PieceLayout { heads, ..LAYOUT };
        let layout = SlabLayout { slot_bytes: pieces.slot_bytes(), slot_count: SLOTS };
        let pool = SlotPool::new(Arc::new(Slab::create("soak", layout, PageSize::Standard)?));
        let mut rails: Vec<Rail<Box<dyn Fabric + Send>>> = Vec::new();
        let mut address = Vec::new();
        let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        for transport in transports.split(',') {
            let slab = pool.slab();
            let (name, device) = transport.split_once(':').unwrap_or((transport, ""));
            let (fabric, rank): (Box<dyn Fabric + Send>, u8) = match name {
                "shm" => {
                    let path = socket.display().to_string();
                    address.push(format!("shm:{path}"));
                    (
                        Box::new(ShmFabric::new(
                            Arc::clone(slab),
                            Some(&path),
                            ShmConfig { key: key.clone(), ..ShmConfig::default() },
                        )?),
                        0,
                    )
                }
                "rdma" => {
                    let device = Device::open(&Library::load()?, Some(device))?;
                    // Seven retries would mean no limit on Soft-RoCE.
                    let config = VerbsConfig { retry_count: 6, key: key.clone(), ..VerbsConfig::default() };
                    let fabric = VerbsFabric::new(device, slab, any, config)?;
                    address.push(format!("rdma:{}", fabric.listening_on().context("bound")?));
                    (Box::new(fabric), 1)
                }
                "tcp" => {
                    let fabric = TcpFabric::new(
                        Arc::clone(slab),
                        any,
                        TcpConfig { key: key.clone(), ..TcpConfig::default() },
                    )?;
                    address.push(format!("tcp:{}", fabric.listening_on().context("bound")?));
                    (Box::new(fabric), 2)
                }
                other => bail!("no transport '{other}': shm, tcp or rdma:DEVICE"),
            };
            rails.push(Rail { fabric, rank });
        }
        let config = BondConfig { seed, ..BondConfig::default() };
        let bond = Bond::new(rails, config, Box::new(std::time::Instant::now));
        let links = Arc::clone(bond.counters());
        let counters = Arc::new(TransferCounters::default());
        let limits = Limits { seed, ..Limits::default() };
        let node = TransferNode::new(bond, pieces, limits, Arc::clone(&counters));
        let service = TransferService::start(node, ThreadPolicy::default(), notify)?;
        Ok(Self { pool, service, counters, links, address: address.join(",") })
    }
}

/// Ranges of these heads in a block of all heads: one for each row of each layer.
pub(crate) fn ranges_of(heads: HeadRange) -> impl Iterator<Item = Range<usize>> {
    let head_bytes = LAYOUT.head_bytes as usize;
    let row_bytes = usize::from(HEADS.count) * head_bytes;
    let (first, len) = (usize::from(heads.first) * head_bytes, usize::from(heads.count) * head_bytes);
    (0..usize::from(LAYERS) * LAYOUT.rows as usize).map(move |row| {
        let start = row * row_bytes + first;
        start..start + len
    })
}

/// Writes these heads of a block to a slot that holds only them.
pub(crate) fn fill_block(slot: &SlotRef, heads: HeadRange, seed: u64, block: usize) {
    let whole = block_bytes(seed, block);
    let bytes: Vec<u8> = ranges_of(heads).flat_map(|range| whole[range].to_vec()).collect();
    slot.slab().write(slot.slot(), 0, &bytes);
}

/// Returns the bytes of a block of a hand-off, with all heads.
pub(crate) fn block_bytes(seed: u64, block: usize) -> Vec<u8> {
    pattern(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ block as u64, SLOT_BYTES)
}

/// Returns bytes in which no stretch repeats.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Runs the peer process: pushes blocks on command, layer by layer and in pieces of a prompt, until its input
/// ends or it is killed.
pub(crate) fn run(transports: &str, socket: &Path, heads: HeadRange) -> Result<()> {
    let secret = std::env::var(SECRET).with_context(|| format!("{SECRET} is not set"))?;
    let key = SharedKey::from_secret(secret.as_bytes())?;
    let node = Node::new(transports, socket, heads, u64::from(std::process::id()), &key, |_| ())?;
    println!("{}", node.address);
    std::io::stdout().flush()?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.split(' ').skip(1).map(str::parse::<u64>);
        let (Some(Ok(transfer)), Some(Ok(blocks)), Some(Ok(seed))) =
            (words.next(), words.next(), words.next())
        else {
            continue;
        };
        let slots: Vec<SlotRef> = (0..blocks).map_while(|_| node.pool.acquire()).collect();
        for (block, slot) in slots.iter().enumerate() {
            fill_block(slot, heads, seed, block);
        }
        let content = content_of(transfer);
        // A prompt is computed in up to three pieces, each layer by layer.
        let piece = slots.len().div_ceil(1 + (seed % 3) as usize).max(1);
        for (number, piece_slots) in slots.chunks(piece).enumerate() {
            let first_block = (number * piece) as u32;
            for layer in 0..LAYERS {
                let (slots, layers) = (piece_slots.to_vec(), layer..layer + 1);
                // Too many commands: this hand-off stays incomplete, which the other side must handle.
                let _full =
                    node.service.submit(Command::Push { transfer, content, first_block, slots, layers });
            }
        }
        let _full = node.service.submit(Command::PushEnd { transfer });
    }
    Ok(())
}

pub(crate) fn content_of(transfer: u64) -> [u8; 16] {
    let mut content = [0; 16];
    content[..8].copy_from_slice(&transfer.to_le_bytes());
    content
}
