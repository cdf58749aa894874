//! Many requests in flight at once, compared with a model of every block.

use std::time::{Duration, Instant};

use super::rig::{Rig, fill};
use super::{Conformance, Open, Random};
use crate::{Operation, Request};

/// Reads and writes of random shape, many in flight, against a model of every block; then all blocks are read
/// again by an engine that is opened anew.
pub fn random_requests(open: &mut Open<'_>, options: &Conformance) {
    let geometry = open().geometry().clone();
    let depth = geometry.depth_max.min(64);
    let longest = geometry.transfer_bytes_max.min(256 << 10).min(options.bytes_max as usize / 8);
    let mut rig = Rig::new(open, options, longest, depth as u32);
    let (block, mut random) = (rig.block, Random(options.seed));
    let files = geometry.files.len();
    // Tag of each block that was written, and the requests in flight on it: a write excludes every other
    // request.
    let blocks: Vec<usize> =
        (0..files).map(|f| (rig.file_bytes(f as u32, options) / block as u64) as usize).collect();
    let mut model: Vec<Vec<Option<u64>>> = blocks.iter().map(|&count| vec![None; count]).collect();
    let mut readers: Vec<Vec<u32>> = blocks.iter().map(|&count| vec![0; count]).collect();
    let mut writing: Vec<Vec<bool>> = blocks.iter().map(|&count| vec![false; count]).collect();
    // Operation, file, first block, number of blocks, tag.
    type UnderWay = (Operation, usize, usize, usize, u64);
    let mut under_way: Vec<Option<UnderWay>> = vec![None; options.requests];
    let (mut next, mut open_count, mut completed) = (0, 0, 0);
    while completed < options.requests {
        let batch = 1 + random.below(8) as usize;
        for _ in 0..batch {
            if next == options.requests || open_count == depth {
                break;
            }
            let file = random.below(files as u64) as usize;
            // Short requests more often, so that many fit beside each other.
            let most = if random.chance(0.2) { longest / block } else { (longest / block).min(8) };
            let count = 1 + random.below(most as u64) as usize;
            let first = random.below((blocks[file] - count) as u64 + 1) as usize;
            let range = first..first + count;
            let operation = if random.chance(0.5) { Operation::Write } else { Operation::Read };
            let free = range
                .clone()
                .all(|at| !writing[file][at] && (operation == Operation::Read || readers[file][at] == 0));
            if !free {
                continue;
            }
            let slack = longest / block - count;
            let mut buffer = rig.buffer(random.below(slack as u64 + 1) as usize * block, count * block);
            let tag = random.draw();
            fill(&mut buffer, block, tag);
            for at in range {
                match operation {
                    Operation::Write => writing[file][at] = true,
                    Operation::Read => readers[file][at] += 1,
                }
            }
            under_way[next] = Some((operation, file, first, count, tag));
            let offset = (first * block) as u64;
            rig.submit(Request { id: next as u64, operation, file: file as u32, offset, buffer });
            next += 1;
            open_count += 1;
        }
        rig.engine.flush().expect("flush");
        let target = if next == options.requests || open_count == depth { 1 } else { 0 };
        let mut arrived = Vec::new();
        let started = Instant::now();
        while rig.engine.poll(16, &mut arrived) == 0 && arrived.len() < target {
            rig.engine.wait(Some(Instant::now() + Duration::from_millis(100))).expect("wait");
            assert!(
                started.elapsed() < rig.patience,
                "stuck with {open_count} under way (seed {})",
                options.seed
            );
        }
        for completion in arrived {
            let request = under_way.get_mut(completion.id as usize).and_then(Option::take);
            let Some((operation, file, first, count, tag)) = request else {
                panic!("request {} completed twice or never was (seed {})", completion.id, options.seed);
            };
            let place = format!("{operation:?} of {count} blocks at block {first} of file {file}");
            completion.result.unwrap_or_else(|error| panic!("{place}: {error} (seed {})", options.seed));
            match operation {
                Operation::Write => {
                    rig.expect(&completion.buffer, |_| Some(tag), "a write leaves its buffer alone");
                    for index in 0..count {
                        model[file][first + index] = Some(tag.wrapping_add(index as u64));
                        writing[file][first + index] = false;
                    }
                }
                Operation::Read => {
                    let known = |at: usize| model[file][first + at].map(|tag| tag.wrapping_sub(at as u64));
                    rig.expect(&completion.buffer, known, &place);
                    (first..first + count).for_each(|at| readers[file][at] -= 1);
                }
            }
            open_count -= 1;
            completed += 1;
        }
        assert_eq!(rig.engine.in_flight(), open_count, "in_flight counts (seed {})", options.seed);
    }
    drop(rig);
    let mut rig = Rig::new(open, options, longest, 1);
    let step = longest / block;
    for (file, tags) in model.iter().enumerate() {
        for (index, tags) in tags.chunks(step).enumerate() {
            if tags.iter().all(Option::is_none) {
                continue;
            }
            let (offset, buffer) = ((index * step * block) as u64, rig.buffer(0, tags.len() * block));
            let completion = rig.run(Operation::Read, file as u32, offset, buffer);
            completion.result.unwrap_or_else(|error| panic!("{error} (seed {})", options.seed));
            let known = |at: usize| tags[at].map(|tag| tag.wrapping_sub(at as u64));
            rig.expect(&completion.buffer, known, &format!("file {file} from {offset:#x}, opened anew"));
        }
    }
}
