//! Random transfers, sizes, timing and cancellations, from a seed.

use std::collections::{BTreeMap, BTreeSet};

use dataplane_fabric::Fabric;
use dataplane_transfer::{Command, Notice, Outcome, TransferId};

use crate::rig::{LAYOUT, PATIENCE_STEPS, RECEIVER, SENDER, World, content};

/// Results of the transfers of one run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Sum {
    pub(crate) outcomes: BTreeMap<String, u64>,
    pub(crate) blocks: usize,
    pub(crate) pushed_whole: u64,
}

impl Sum {
    pub(crate) fn of(&self, outcome: Outcome) -> u64 {
        self.outcomes.get(&format!("{outcome:?}")).copied().unwrap_or(0)
    }
}

/// Runs `count` transfers, and waits for both sides' notices of each.
pub(crate) fn transfers<F: Fabric>(
    world: &mut World<F>,
    random: &mut fastrand::Rng,
    count: u64,
    cancel_one_in: u64,
    mut accident: impl FnMut(u64, &mut fastrand::Rng, &mut World<F>),
) -> Sum {
    let (mut sum, mut held_of) = (Sum::default(), BTreeMap::new());
    let mut pushed = BTreeSet::new();
    for transfer in 1..=count {
        let blocks = 1 + random.u64(..12) as usize;
        let held = random.u64(..blocks as u64) as usize;
        let is_first = random.u64(..2) == 0;
        held_of.insert(transfer, held);
        let sources = world.sides[SENDER].slots(blocks);
        let targets = world.sides[RECEIVER].slots(blocks - held);
        if is_first {
            world.expect(transfer, held as u32, targets.clone());
        }
        for (block, slot) in sources.iter().enumerate() {
            world.sides[SENDER].fill(slot, &content(transfer, block));
        }
        for layer in 0..LAYOUT.layers {
            world.push(transfer, &sources, layer..layer + 1);
            world.run(random.u64(..3) as usize);
            if cancel_one_in > 0 && random.u64(..cancel_one_in * u64::from(LAYOUT.layers)) == 0 {
                world.command(random.u64(..2) as usize, Command::Cancel { transfer });
            }
        }
        drop(sources);
        world.command(SENDER, Command::PushEnd { transfer });
        if !is_first {
            world.expect(transfer, held as u32, targets);
        }
        accident(transfer, random, world);
        for _ in 0..random.u64(..40) {
            world.step();
            count_up(world, &mut sum, &mut held_of, &mut pushed);
        }
    }
    // If messages are lost, transfers whose receiver never comes hold staging slots until their leases end,
    // and other transfers wait for these slots.
    for _ in 0..PATIENCE_STEPS {
        if held_of.is_empty() && pushed.len() as u64 == count {
            return sum;
        }
        world.step();
        count_up(world, &mut sum, &mut held_of, &mut pushed);
    }
    panic!("never told of: {held_of:?}; of {count} pushes, told of {pushed:?}");
}

fn count_up<F: Fabric>(
    world: &mut World<F>,
    sum: &mut Sum,
    held_of: &mut BTreeMap<TransferId, usize>,
    pushed: &mut BTreeSet<TransferId>,
) {
    for notice in std::mem::take(&mut world.sides[RECEIVER].notices) {
        let Notice::Arrived { transfer, slots, outcome } = notice else { panic!("{notice:?}") };
        let held = held_of.remove(&transfer).expect("told once, and only of what was expected");
        world.check(&slots, transfer, held);
        sum.blocks += slots.len();
        *sum.outcomes.entry(format!("{outcome:?}")).or_default() += 1;
    }
    for notice in std::mem::take(&mut world.sides[SENDER].notices) {
        let Notice::Pushed { transfer, complete } = notice else { panic!("{notice:?}") };
        let is_first = pushed.insert(transfer);
        assert!(is_first || !complete, "complete, after it was over");
        sum.pushed_whole += u64::from(complete);
    }
}
