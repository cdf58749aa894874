//! The same on a real device, where there is one: `cargo test -p dataplane-gpu --test device -- --nocapture`. Without a
//! device or NVIDIA's run-time compiler each test says why it is skipped.

mod checks;
#[allow(dead_code, reason = "only its random numbers are used")]
#[path = "../../kernels/tests/emulator/harness.rs"]
mod harness;

use std::sync::Arc;

use checks::Rig;
use dataplane_cuda::{Cuda, Device};
use dataplane_gpu::{KernelsError, LayoutKernels};
use harness::{Random, seed};

/// The first two devices, or the only one twice; `None` after the reason was printed.
fn rig() -> Option<Rig> {
    let cuda = match Cuda::open() {
        Ok(cuda) => cuda,
        Err(reason) => {
            eprintln!("SKIPPED: {reason}");
            return None;
        }
    };
    let count = cuda.devices().expect("devices").len() as u32;
    let devices = [0, 1.min(count - 1)].map(|ordinal| cuda.device(ordinal).expect("device"));
    let compiled = devices.each_ref().map(|device| LayoutKernels::compile(device).map(Arc::new));
    let kernels = match compiled.into_iter().collect::<Result<Vec<_>, KernelsError>>() {
        Ok(kernels) => kernels,
        Err(reason @ KernelsError::Compile { error: dataplane_cuda::CompileError::NoLibrary { .. }, .. }) => {
            eprintln!("SKIPPED: {reason}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    for kernels in &kernels {
        let description = kernels.device().description();
        let form = kernels.why_text().unwrap_or("machine code");
        eprintln!("{}: kernels compiled and loaded in {:?}: {form}", description.name, kernels.took());
    }
    let of = |device: &Device| {
        let ordinal = device.description().ordinal;
        let of_device = |kernels: &&Arc<LayoutKernels>| kernels.device().description().ordinal == ordinal;
        kernels.iter().find(of_device).expect("compiled").clone()
    };
    Some(Rig::new(devices, of))
}

#[test]
fn random_tensors_arrive_on_another_device_to_the_byte() {
    let Some(mut rig) = rig() else { return };
    checks::copies_arrive_on_another_device(&mut rig, &mut Random(seed(401)), 200);
}

#[test]
fn random_ranges_of_slots_have_the_sums_that_a_processor_takes() {
    let Some(rig) = rig() else { return };
    checks::sums_of_ranges_are_those_of_the_processor(rig, &mut Random(seed(403)), 2000);
}
