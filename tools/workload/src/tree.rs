//! Prompts that share prefixes as chats do: a system prompt, a conversation so far, a new turn.

use std::collections::HashSet;

use crate::{Operation, Random, Workload, chained};

/// Parameters of the tree.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Random seed. Equal seeds give equal workloads.
    pub seed: u64,
    /// Number of workers.
    pub workers: usize,
    /// Number of different prompts.
    pub chains: usize,
    /// Number of blocks of a prompt.
    pub blocks: usize,
    /// Number of different system prompts; each is a quarter of a prompt.
    pub systems: usize,
    /// Number of prompts that share a conversation, which is half of a prompt.
    pub turns: usize,
    /// Number of workers that computed a prompt.
    pub holders: usize,
}

impl Default for Shape {
    fn default() -> Self {
        Self { seed: 1, workers: 8, chains: 200, blocks: 128, systems: 8, turns: 4, holders: 2 }
    }
}

/// Returns the prompts.
#[must_use]
pub fn prompts(shape: &Shape) -> Vec<Vec<u64>> {
    let mut random = Random::new(shape.seed);
    let fresh = |random: &mut Random, len: usize| -> Vec<u64> { (0..len).map(|_| random.bits()).collect() };
    let (system, conversation) = (shape.blocks / 4, shape.blocks / 2);
    let systems: Vec<Vec<u64>> = (0..shape.systems).map(|_| fresh(&mut random, system)).collect();
    let mut prompts = Vec::with_capacity(shape.chains);
    let mut so_far: Vec<u64> = Vec::new();
    for chain in 0..shape.chains {
        if chain % shape.turns == 0 {
            so_far = systems[random.below(shape.systems)].clone();
            so_far.extend(fresh(&mut random, conversation));
        }
        let mut prompt = so_far.clone();
        prompt.extend(fresh(&mut random, shape.blocks - system - conversation));
        prompts.push(prompt);
    }
    prompts
}

/// Each prompt is stored by some workers, as engines report it: blocks that a worker holds are not stored again. Then every
/// prompt is looked up.
#[must_use]
pub fn workload(shape: &Shape) -> Workload {
    let prompts = prompts(shape);
    let mut operations = stores(shape, &prompts);
    operations.extend(prompts.into_iter().map(|blocks| Operation::Lookup { blocks }));
    Workload { workers: shape.workers, operations }
}

/// Returns the stores of [`workload`].
#[must_use]
pub fn stores(shape: &Shape, prompts: &[Vec<u64>]) -> Vec<Operation> {
    let mut random = Random::new(shape.seed ^ 0x5EED);
    let mut held: Vec<HashSet<u64>> = vec![HashSet::new(); shape.workers];
    let mut operations = Vec::new();
    for prompt in prompts {
        let sequences = chained(prompt);
        for _ in 0..shape.holders {
            let worker = random.below(shape.workers);
            let known = sequences.iter().take_while(|hash| held[worker].contains(hash)).count();
            if known == prompt.len() {
                continue;
            }
            held[worker].extend(&sequences[known..]);
            operations.push(Operation::Stored {
                worker,
                parent: known.checked_sub(1).map(|last| sequences[last]),
                blocks: prompt[known..].iter().copied().zip(sequences[known..].iter().copied()).collect(),
            });
        }
    }
    operations
}

/// Removals of all blocks that `stores` stored, last stored first and from the end of each run, in an engine's order of
/// eviction.
#[must_use]
pub fn removals(stores: &[Operation]) -> Vec<Operation> {
    let of = |operation: &Operation| match operation {
        Operation::Stored { worker, blocks, .. } => Some(Operation::Removed {
            worker: *worker,
            sequences: blocks.iter().rev().map(|block| block.1).collect(),
        }),
        _ => None,
    };
    stores.iter().rev().filter_map(of).collect()
}
