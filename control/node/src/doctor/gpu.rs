//! Lists the GPUs, and the path that bytes would take between their memory and a NIC.

use std::path::Path;

use dataplane_cuda::{Cuda, DeviceDescription, DirectProbe, GpuDirect, Unavailable};
use dataplane_verbs::{Device, Library};

use super::Finding;

pub(super) fn gpu() -> Finding {
    let (found, consequence) = match Cuda::open().map(|cuda| (cuda.driver_version(), cuda.devices())) {
        Ok((version, Ok(devices))) => {
            let named: Vec<String> = devices.iter().map(describe).collect();
            // Based on the driver's and the library's own report; the kernel's support shows only when memory
            // is registered.
            let ways: Vec<String> = devices.iter().map(|device| way(device).to_string()).collect();
            (format!("CUDA {version}: {}", named.join("; ")), alike(&ways))
        }
        Ok((version, Err(error))) => (format!("CUDA {version}: {error}"), unused().to_owned()),
        Err(unavailable) => (without(&unavailable), unused().to_owned()),
    };
    Finding { what: "GPU", found, consequence }
}

fn unused() -> &'static str {
    "not used: KV lives in host memory"
}

/// Explains why no GPU is available; a driver without its library is an installation fault.
fn without(unavailable: &Unavailable) -> String {
    let has_driver = Path::new("/dev/nvidiactl").exists();
    match unavailable {
        Unavailable::NoLibrary { .. } if has_driver => format!("an NVIDIA driver, but {unavailable}"),
        Unavailable::NoLibrary { .. } => format!("no GPU here: {unavailable}"),
        other => other.to_string(),
    }
}

fn describe(device: &DeviceDescription) -> String {
    let place = device.pci_address.map_or_else(String::new, |address| format!(" at {address}"));
    let (major, minor) = device.compute_capability;
    format!(
        "{}{place}, {} GiB, compute {major}.{minor}, {} copy engines",
        device.name,
        device.memory_bytes >> 30,
        device.copy_engines
    )
}

fn way(device: &DeviceDescription) -> GpuDirect {
    let library = Library::load();
    let has_nic =
        library.as_ref().is_ok_and(|library| Device::names(library).is_ok_and(|names| !names.is_empty()));
    let takes = library.is_ok_and(|library| library.takes_dma_buf());
    GpuDirect::choose(&DirectProbe { has_nic, nic_takes_dma_buf: takes, ..DirectProbe::of(device) })
}

/// Returns a single text if all devices are equal.
fn alike(ways: &[String]) -> String {
    let same = ways.windows(2).all(|pair| pair[0] == pair[1]);
    let told = if same { ways.first().cloned().unwrap_or_default() } else { ways.join("; ") };
    format!(
        "not used yet: the reference engine computes on the CPU. Blocks could move between GPU and network {told}"
    )
}

#[cfg(test)]
mod tests {
    use dataplane_cuda::DriverVersion;

    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        let none = Unavailable::NoLibrary { tried: "libcuda.so".to_owned() };
        assert!(without(&none).contains("libcuda.so"));
        let old = Unavailable::DriverTooOld { version: DriverVersion(10_020), needed: DriverVersion(11_040) };
        assert!(without(&old).contains("10.2") && without(&old).contains("11.4"));
        let ways = ["direct".to_owned(), "direct".to_owned()];
        assert!(alike(&ways).ends_with("network direct"));
        assert!(alike(&["a".to_owned(), "b".to_owned()]).ends_with("a; b"));
    }
}
