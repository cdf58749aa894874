//! Without the driver's library: an answer, and no panic. A process of its own, since nothing may have loaded it.

use dataplane_cuda::{Cuda, Unavailable};

#[test]
fn a_machine_without_the_driver_is_told_so() {
    match Cuda::open() {
        Err(error @ Unavailable::NoLibrary { .. }) => {
            assert!(error.to_string().contains("libcuda.so.1"), "{error}");
            assert_eq!(Cuda::open().expect_err("again"), error);
        }
        other => eprintln!("skipped: this machine has the driver's library: {other:?}"),
    }
}
