//! The suite of the trait on several kinds of device.

use kvstore_io::IoEngine;
use kvstore_io::testing::{Conformance, conformance};
use kvstore_nvme::testing::{Faults, SoftwareController, SoftwareDevice};
use kvstore_nvme::{NvmeConfig, NvmeEngine};

fn run(name: &str, device: SoftwareDevice, config: NvmeConfig, faults: Faults) -> SoftwareController {
    eprintln!("{name}: {device:?}");
    let controller = SoftwareController::start(device, faults);
    let mut open =
        || -> Box<dyn IoEngine> { Box::new(NvmeEngine::attach(controller.bus(), &config).expect("attach")) };
    conformance(&mut open, &Conformance { requests: 1500, ..Conformance::default() });
    let counters = controller.counters();
    assert_eq!((counters.unmapped_accesses, counters.violations), (0, 0), "{counters:?}");
    assert_eq!(controller.mapping_count(), 0);
    assert!(counters.shutdowns > 8 && counters.flushes > 0, "{counters:?}");
    eprintln!("{name}: {counters:?}");
    controller
}

#[test]
fn with_scatter_gather() {
    let counters = run("sgl", SoftwareDevice::default(), NvmeConfig::default(), Faults::default()).counters();
    assert!(counters.sgl > 0 && counters.page_lists == 0, "{counters:?}");
}

#[test]
fn with_page_lists_and_small_transfers() {
    let device = SoftwareDevice {
        block_bytes: 4096,
        blocks: 16 << 10,
        transfer_exponent: 4,
        takes_sgl: false,
        doorbell_stride: 3,
        ..SoftwareDevice::default()
    };
    let config = NvmeConfig { transfer_bytes_max: 1 << 20, ..NvmeConfig::default() };
    let counters = run("page lists", device, config, Faults::default()).counters();
    assert!(counters.sgl == 0 && counters.page_lists > 0, "{counters:?}");
}

#[test]
fn with_the_longest_page_lists() {
    let device = SoftwareDevice { transfer_exponent: 0, ..SoftwareDevice::default() };
    let config = NvmeConfig { use_sgl: false, ..NvmeConfig::default() };
    run("long lists", device, config, Faults::default());
}

#[test]
fn with_several_pairs_out_of_order() {
    let device = SoftwareDevice { queue_pairs: 3, ..SoftwareDevice::default() };
    let config = NvmeConfig {
        queue_pairs: 4,
        queue_entries: 16,
        transfer_bytes_max: 1 << 20,
        ..NvmeConfig::default()
    };
    let faults = Faults { seed: 11, reordered_per_mille: 300, ..Faults::default() };
    run("several pairs", device, config, faults);
}

#[test]
fn with_the_smallest_queues_and_one_bounce_buffer() {
    let device = SoftwareDevice { queue_entries_max: 2, ..SoftwareDevice::default() };
    let config = NvmeConfig {
        requests_max: 40,
        bounce_buffers: 1,
        bounce_bytes: 4096,
        transfer_bytes_max: 256 << 10,
        ..NvmeConfig::default()
    };
    run("smallest", device, config, Faults::default());
}
