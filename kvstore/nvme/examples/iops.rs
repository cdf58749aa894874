//! Reads of 4 KiB at random places, for a look beside fio: `iops PCI_ADDRESS [SECONDS [DEPTH…]]`. Writes nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_io::{Buffer, IoEngine, Operation, Request};
use kvstore_nvme::{NvmeConfig, NvmeEngine};

const BLOCK_BYTES: usize = 4096;
/// Maximum number of bytes of the device that are read.
const BYTES_MAX: u64 = 256 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("usage: iops PCI_ADDRESS [SECONDS [DEPTH…]]")?.parse()?;
    let seconds: u64 = arguments.next().map_or(Ok(3), |text| text.parse())?;
    let mut depths = arguments.map(|text| text.parse()).collect::<Result<Vec<usize>, _>>()?;
    if depths.is_empty() {
        depths = vec![1, 32];
    }
    let mut engine = NvmeEngine::open(address, &NvmeConfig::default())?;
    let depth_max = depths.iter().copied().max().unwrap_or(1);
    let layout = SlabLayout { slot_bytes: BLOCK_BYTES, slot_count: depth_max as u32 };
    let slots = SlotPool::new(Arc::new(Slab::create("iops", layout, PageSize::HugeIfAvailable)?));
    engine.register(slots.slab())?;
    let blocks = engine.geometry().files[0].min(BYTES_MAX) / BLOCK_BYTES as u64;
    let (mut completions, mut state) = (Vec::with_capacity(depth_max), 1_u64);
    for depth in depths {
        let (started, mut done) = (Instant::now(), 0_u64);
        let mut free: Vec<Buffer> = (0..depth)
            .filter_map(|_| slots.acquire())
            .map(|slot| Buffer::Slot { slot, offset: 0, len: BLOCK_BYTES })
            .collect();
        while started.elapsed() < Duration::from_secs(seconds) {
            while let Some(buffer) = free.pop() {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let offset = (state >> 33) % blocks * BLOCK_BYTES as u64;
                let request = Request { id: done, operation: Operation::Read, file: 0, offset, buffer };
                engine.submit(request).map_err(|_| "more in flight than the engine takes")?;
            }
            engine.flush()?;
            while engine.poll(depth, &mut completions) == 0 {
                std::hint::spin_loop();
            }
            for completion in completions.drain(..) {
                completion.result?;
                done += 1;
                free.push(completion.buffer);
            }
        }
        let elapsed = started.elapsed().as_secs_f64();
        println!("nvme_user 4k randread depth {depth}: {:.0} IOPS", done as f64 / elapsed);
        while engine.in_flight() > 0 {
            engine.poll(depth, &mut completions);
        }
        completions.clear();
    }
    Ok(())
}
