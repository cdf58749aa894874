//! Path of bytes between the device and a NIC. Reports only the path, as there is no rate without a NIC.

use std::path::Path;

use anyhow::Result;
use dataplane_cuda::{Device, DeviceMemory, DirectProbe, DmaBufMapping, GpuDirect};

use super::rig::slab;

/// Folder in which the kernel lists NICs that register memory.
const NICS: &str = "/sys/class/infiniband";

pub(super) fn run(device: &Device) -> Result<()> {
    let names: Vec<String> = std::fs::read_dir(Path::new(NICS))
        .map(|entries| {
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        })
        .unwrap_or_default();
    let memory = slab(device, 2 << 20, 1)?;
    let probe = DirectProbe {
        has_nic: !names.is_empty(),
        export: Some(memory.dma_buf(DmaBufMapping::Automatic).map(drop)),
        ..DirectProbe::of(device.description())
    };
    let with_a_nic = DirectProbe { has_nic: true, ..probe.clone() };
    println!("# d2n: NICs {names:?}: {}", GpuDirect::choose(&probe));
    if names.is_empty() {
        println!("with a NIC that takes DMA buffers it would be: {}", GpuDirect::choose(&with_a_nic));
    }
    Ok(())
}
