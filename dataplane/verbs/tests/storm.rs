//! Two hundred connections at once. A process of its own, since it counts the process's descriptors.

mod support;

use dataplane_verbs::VerbsConfig;
use dataplane_verbs::testing::SoftwareDevice;
use support::small;

#[test]
fn a_storm_of_connections_leaves_nothing_behind() {
    let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let config = VerbsConfig { send_queue_depth: 32, request_queue_depth: 16, ..small() };
    support::storm(device_a.open().expect("open"), device_b.open().expect("open"), &config, 200);
    assert_eq!((device_a.usage(), device_b.usage()), (Default::default(), Default::default()));
}
