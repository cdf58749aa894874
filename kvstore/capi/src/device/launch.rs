//! Launches kernels and waits for them.

use std::time::{Duration, Instant};

use dataplane_cuda::CudaError;
use dataplane_gpu::{Finished, KernelQueue, Refusal};

use super::failed;
use crate::status::{Failure, Status};

/// Kernels take microseconds: the device is asked again at once, and after this with pauses.
const SPIN_MAX: Duration = Duration::from_millis(1);
/// Pause before the device is asked again whether it has finished.
const KERNEL_PAUSE: Duration = Duration::from_micros(20);
/// The token of a batch that takes or compares checksums; others have 0.
pub(crate) const SUMS: u64 = 1;

/// Launches what `start` puts on the stream, and waits for all of it. `sums` gets the end of batches with the token [`SUMS`];
/// of others each item must have been done.
pub(crate) fn launch(
    queue: &mut KernelQueue,
    start: impl FnOnce(&mut KernelQueue) -> Result<(), Refusal>,
    mut sums: impl FnMut(&Finished<'_>),
) -> Result<(), Failure> {
    let result = start(queue).map_err(|refusal| failed("launch", &refusal));
    // Also after a refusal: what is on the stream must be over before anybody uses the slots again.
    let mut device: Result<(), CudaError> = Ok(());
    let mut has_refused_items = false;
    let began = Instant::now();
    while queue.in_flight() > 0 {
        let ended = queue.poll(usize::MAX, |end| {
            device = device.and(end.result);
            if end.token == SUMS {
                sums(&end);
            } else {
                has_refused_items |= end.statuses.iter().any(|status| *status != 0);
            }
        });
        if ended > 0 {
            continue;
        }
        if began.elapsed() < SPIN_MAX {
            std::thread::yield_now();
        } else {
            std::thread::sleep(KERNEL_PAUSE);
        }
    }
    result?;
    device.map_err(|error| failed("the device", &error))?;
    if has_refused_items {
        return Err(Failure::new(Status::Panicked, "a kernel has refused a block that was checked before"));
    }
    Ok(())
}

/// Waits for what a panic has left on the stream, and lets go of the memory that it was given: the device's work is over
/// then.
pub(crate) fn settle(queue: &mut KernelQueue) {
    // An error is a device that is lost, which works on nothing any more.
    let _lost = queue.stream().synchronise();
    // All batches are over, so one look finds them. The bug may be there too.
    let _panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| queue.poll(usize::MAX, |_| {})));
}
