//! Launches kernels and waits for them.

use std::time::{Duration, Instant};

use dataplane_cuda::CudaError;
use dataplane_gpu::{Finished, KernelQueue, SubmitError};

use super::failed;
use crate::status::{Failure, Status};

/// Time for which the device is polled without pauses; kernels take microseconds.
const SPIN_MAX: Duration = Duration::from_millis(1);
/// Pause between polls of the device after [`SPIN_MAX`].
const KERNEL_PAUSE: Duration = Duration::from_micros(20);
/// Token of a batch that computes or compares checksums. Other batches have 0.
pub(crate) const SUMS: u64 = 1;

/// Launches the work that `start` puts on the stream, and waits for all of it. `sums` receives the end of
/// batches with the token [`SUMS`]; all items of other batches must have been done.
pub(crate) fn launch(
    queue: &mut KernelQueue,
    start: impl FnOnce(&mut KernelQueue) -> Result<(), SubmitError>,
    mut sums: impl FnMut(&Finished<'_>),
) -> Result<(), Failure> {
    let result = start(queue).map_err(|refusal| failed("launch", &refusal));
    // Wait after a refusal too: work on the stream must end before the slots are used again.
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

/// Waits for work that a panic has left on the stream, and releases the memory given to it.
pub(crate) fn wait_after_panic(queue: &mut KernelQueue) {
    // An error means that the device is lost and runs no more work.
    let _lost = queue.stream().synchronise();
    // All batches have ended, so one poll finds them. The bug that caused the panic may be in `poll` too.
    let _panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| queue.poll(usize::MAX, |_| {})));
}
