//! A steady load of short requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::site::{ask, chat};

/// Requests at a steady rate until drop; none may fail.
pub struct Load {
    is_over: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Load {
    pub fn start(address: &str, per_second: u64) -> Self {
        const THREADS: u64 = 8;
        let (is_over, answered): (Arc<AtomicBool>, Arc<AtomicU64>) = Default::default();
        let thread = |number: u64| {
            let (is_over, answered, address) =
                (Arc::clone(&is_over), Arc::clone(&answered), address.to_owned());
            std::thread::spawn(move || {
                let pause = Duration::from_micros(1_000_000 * THREADS / per_second);
                let (began, mut sent) = (Instant::now(), 0_u32);
                while !is_over.load(Ordering::SeqCst) {
                    let (status, answer) =
                        ask(&address, &chat(8, (number * 1_000) as usize + sent as usize, 1));
                    assert_eq!(status, 200, "{answer}");
                    answered.fetch_add(1, Ordering::SeqCst);
                    sent += 1;
                    std::thread::sleep((pause * sent).saturating_sub(began.elapsed()));
                }
            })
        };
        let threads = (0..THREADS).map(thread).collect();
        Self { is_over, answered, threads }
    }

    /// Stops the load; returns the number of answers.
    pub fn end(self) -> u64 {
        self.is_over.store(true, Ordering::SeqCst);
        self.threads.into_iter().for_each(|thread| thread.join().expect("no request failed"));
        self.answered.load(Ordering::SeqCst)
    }
}
