//! `kvasir-bench`: the same benchmarks as `kvasir bench`, in a binary that also counts allocations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use bench::{ALLOCATIONS, BenchArgs};
use clap::Parser;

/// Microbenchmarks of Kvasir.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: BenchArgs,
}

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is handed to the system's allocator unchanged; the counter does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter any more.
        let _ending = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> std::process::ExitCode {
    // Set once, here.
    let _first = ALLOCATIONS.set(|| COUNT.with(Cell::get));
    bench::exit_code(bench::run(Cli::parse().args))
}
