//! New blocks of host memory, offered to the tiers of other nodes in the portions that these take.

use kvstore_block::BlockIdentity;
use kvstore_plan::Priority;

use super::{FarLinks, Outgoing, Portion};
use crate::HostBlock;
use crate::metrics::StoreCounters;
use crate::shared::HOST;
use crate::tiers::Tiers;

impl FarLinks {
    /// Offers a block that is new in host memory. One whose chain is not in host memory as far as the tier needs it is not
    /// offered.
    pub(crate) fn offer(&mut self, identity: BlockIdentity, tiers: &mut Tiers) {
        self.offer_to_first(self.links.len(), identity, tiers);
    }

    /// The same for the tiers that are asked first, so many of them.
    pub(super) fn offer_to_first(&mut self, count: usize, identity: BlockIdentity, tiers: &mut Tiers) {
        let count = count.min(self.links.len());
        for link in &mut self.links[..count] {
            let Some(last) = outgoing(identity, tiers) else { return };
            let position = last.description.position;
            let (steps, is_run) = match link.portion() {
                Portion::Single { group } => (position % group.max(1), false),
                Portion::Run(run) if (position + 1).is_multiple_of(run.max(1)) => (run.max(1) - 1, true),
                Portion::Run(_) => continue,
            };
            let Some((blocks, head)) = portion_of(last, steps, is_run, tiers) else { continue };
            let bytes = blocks.iter().map(|block| block.block.len() as u64).sum();
            if tiers.bandwidth.admit(link.tier(), Priority::Offload, bytes).is_ok() {
                link.offer(blocks, head);
            } else {
                StoreCounters::add(&tiers.shared.counters.throttled, blocks.len());
            }
        }
    }
}

/// A block of host memory of which it is known what it is.
pub(super) fn outgoing(identity: BlockIdentity, tiers: &Tiers) -> Option<Outgoing> {
    let lease = tiers.shared.catalog.pin(HOST, &identity)?;
    let description = tiers.description(lease.slot())?.clone();
    let memory = &tiers.shared.memory;
    let slot = memory.slot(lease.slot()).clone();
    Some(Outgoing { identity, description, slot, block: HostBlock { lease, memory: memory.clone() } })
}

/// The block `steps` before `last` in its chain, and all blocks from there if they are wanted.
fn portion_of(
    last: Outgoing,
    steps: u32,
    is_run: bool,
    tiers: &Tiers,
) -> Option<(Vec<Outgoing>, BlockIdentity)> {
    let mut head = last.identity;
    let mut parent = last.description.parent;
    let mut blocks = vec![last];
    for _ in 0..steps {
        let before = outgoing(parent?, tiers)?;
        (head, parent) = (before.identity, before.description.parent);
        if is_run {
            blocks.push(before);
        }
    }
    blocks.reverse();
    Some((blocks, head))
}
