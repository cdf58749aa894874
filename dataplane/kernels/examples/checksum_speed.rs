//! Speed of the checksum on a processor: `cargo run --release -p dataplane-kernels --example checksum_speed`.

use std::hint::black_box;
use std::time::Instant;

use dataplane_kernels::checksum;

fn main() {
    for bytes in [4 << 10, 64 << 10, 2 << 20, 64 << 20] {
        let slot: Vec<u8> = (0..bytes).map(|at| (at * 31 + at / 255) as u8).collect();
        let rounds = ((256 << 20) / bytes).max(3);
        let best = (0..5)
            .map(|_| {
                let start = Instant::now();
                for _ in 0..rounds {
                    black_box(checksum(black_box(&slot)));
                }
                start.elapsed().as_secs_f64() / rounds as f64
            })
            .fold(f64::INFINITY, f64::min);
        println!("{bytes:>9} bytes: {:.1} GB/s", bytes as f64 / best / 1e9);
    }
}
