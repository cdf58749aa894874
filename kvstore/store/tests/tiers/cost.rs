//! Cost of blocks: a block further back in a prompt costs more to compute again.

use crossbeam_channel::unbounded;
use dataplane_memory::PageSize;
use kvstore_catalog::PolicyKind;
use kvstore_io::faulty::Faults;
use kvstore_store::{HostTier, StoreBuilder, StoreConfig, WriteMode};

use crate::rig::{BLOCK, PATIENCE, Rig, TOKENS, chain, files, no_disk, open_disk, with_disk};

/// Blocks of a prompt's end were read from the disk before those of another's start: when one has to go it is of the start,
/// though the end was used less lately.
#[test]
fn blocks_read_from_a_prompts_end_outlive_those_of_a_start() {
    let disk = files(64);
    let (long, short) = (chain(1, 40), chain(2, 3));
    let mut rig = Rig::new(with_disk(48, &disk, WriteMode::Through));
    (0..40).for_each(|position| rig.offload(&long, position));
    (0..3).for_each(|position| rig.offload(&short, position));
    rig.wait_until_on_disk(43);
    drop(rig);

    let host = HostTier { slots: 4, pages: PageSize::Standard, eviction: PolicyKind::Cost };
    let (sender, moved) = unbounded();
    let notify = move |event| {
        let _over = sender.send(event);
    };
    let builder = StoreBuilder::new(StoreConfig::new(BLOCK, TOKENS), host).expect("memory");
    let (store, survivors) =
        builder.disk(open_disk(&disk, Faults::default())).start(notify).expect("threads");
    let mut rig = Rig { store, moved, survivors, ..Rig::new(no_disk(1)) };
    assert_eq!(rig.onboard_from(38, &long[38..], PATIENCE), 2);
    assert_eq!(rig.onboard(&short[..2], PATIENCE), 2);
    assert_eq!(rig.onboard_from(37, &long[37..38], PATIENCE), 1, "it needs the place of another");
    assert!(long[37..].iter().all(|identity| rig.store.is_on_host(identity)), "they cost most");
    assert!(rig.store.is_on_host(&short[0]) && !rig.store.is_on_host(&short[1]));
}
