//! What an engine reports of its load, in a task of its own for each worker.
//!
//! `/metrics` and SGLang's `/server_info` ask the engine's scheduler, which answers them when it has time. A late report
//! says that the engine is busy, not that it is dead, so nothing here takes a worker out; `watch` does that. A report that
//! names another run of the process has `watch` ask for its description.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::worker::Worker;

/// A report that takes longer is given up, and asked for again.
const REPORT_WITHIN: Duration = Duration::from_secs(30);

/// Asks a worker for its load every `interval`, until the task is aborted.
pub(crate) async fn report(worker: Arc<Worker>, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let lives = worker.lives.load_full();
        let Some(first) = lives.first() else { continue };
        let asked = Instant::now();
        let known: Vec<u32> = lives.iter().map(|live| live.load.counts()[0]).collect();
        let dialect = first.description.engine.dialect();
        let answered = tokio::time::timeout(REPORT_WITHIN, dialect.report(&worker.client)).await;
        let Ok(Ok(report)) = answered else { continue };
        for (rank, (live, known)) in lives.iter().zip(known).enumerate() {
            let load = report.loads.get(rank).copied();
            if let Some(load) = &load {
                live.reported.set(load, asked);
            }
            // A request that came or went meanwhile is known all the same.
            let known = known.max(live.load.counts()[0]);
            live.capacity.report(&load.unwrap_or_default(), report.requests_max, known);
        }
        let other_run = match (first.description.instance, report.instance) {
            (Some(before), Some(now)) => before != now,
            _ => false,
        };
        // The worker may have described itself again while the report was on its way.
        if other_run && Arc::ptr_eq(&lives, &worker.lives.load_full()) {
            worker.doubt();
        }
    }
}
