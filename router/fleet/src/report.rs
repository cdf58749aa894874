//! Reports of an engine's load. One task per worker.
//!
//! `/metrics` and SGLang's `/server_info` query the engine's scheduler, which may answer late. A late report shows that the
//! engine is busy, not that it is dead, so this module takes no worker out; `health` does that. After a report with another run
//! number `health` requests the worker's description. A report may also name stores that the worker shares with others
//! (`stores`).

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use router_engines::dialect::SharedStores;

use crate::fleet::Fleet;
use crate::worker::{Worker, WorkerRun};

/// Time limit of a report, which is then requested again.
const REPORT_WITHIN: Duration = Duration::from_secs(30);

/// Requests a worker's load every `health_interval`, until it is removed or the fleet is gone.
pub(crate) async fn report(fleet: Weak<Fleet>, worker: Arc<Worker>) {
    let Some(interval) = fleet.upgrade().map(|fleet| fleet.config.health_interval) else { return };
    tokio::select! {
        () = worker.removed() => {}
        () = ask(&fleet, &worker, interval) => {}
    }
}

/// Updates the stores that a worker shares, if they have changed.
async fn share_stores(
    fleet: Arc<Fleet>,
    worker: &Arc<Worker>,
    runs: &Arc<Vec<Arc<WorkerRun>>>,
    told: Vec<Option<SharedStores>>,
) {
    let told = told.into_iter().chain(std::iter::repeat(None));
    let news: Vec<_> = runs
        .iter()
        .cloned()
        .zip(told)
        .filter(|(run, stores)| !fleet.stores.is_known(run, stores.as_ref()))
        .collect();
    if news.is_empty() {
        return;
    }
    // A run that has ended meanwhile must not join again.
    let _turn = fleet.joining.lock().await;
    if !Arc::ptr_eq(runs, &worker.runs.load_full()) {
        return;
    }
    let (by, of, before) = (Arc::clone(&fleet), Arc::clone(worker), Arc::clone(runs));
    let joined = tokio::task::spawn_blocking(move || {
        for (run, stores) in news {
            by.stores.leave(&by.index, &run);
            if let Some(stores) = stores {
                by.stores.join(&by.index, &run, &stores, &by.known);
            }
            // The closure continues after the worker's removal, and its runs may have left before they joined.
            if !Arc::ptr_eq(&before, &of.runs.load_full()) {
                by.stores.leave(&by.index, &run);
            }
        }
    });
    // The task fails only when the runtime ends.
    drop(joined.await);
}

async fn ask(fleet: &Weak<Fleet>, worker: &Arc<Worker>, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let runs = worker.runs.load_full();
        let Some(first) = runs.first() else { continue };
        let asked = Instant::now();
        let known: Vec<u32> = runs.iter().map(|run| run.load.counts()[0]).collect();
        let dialect = first.description.engine.dialect();
        let answered = tokio::time::timeout(REPORT_WITHIN, dialect.report(&worker.client)).await;
        let Ok(Ok(mut report)) = answered else { continue };
        for (rank, (run, known)) in runs.iter().zip(known).enumerate() {
            let load = report.loads.get(rank).copied();
            if let Some(load) = &load {
                run.reported.set(load, asked);
            }
            let transfers = report.transfers.get_mut(rank).map(std::mem::take);
            run.transfers.store(transfers.map(Arc::new));
            // A request that began or ended meanwhile is counted all the same.
            let known = known.max(run.load.counts()[0]);
            run.capacity.report(&load.unwrap_or_default(), report.requests_max, known);
            run.reorder();
        }
        if let Some(fleet) = fleet.upgrade() {
            share_stores(fleet, worker, &runs, report.stores).await;
        }
        let other_run = match (first.description.instance, report.instance) {
            (Some(before), Some(now)) => before != now,
            _ => false,
        };
        // The worker may have described itself again while the report was on its way.
        if other_run && Arc::ptr_eq(&runs, &worker.runs.load_full()) {
            worker.mark_possibly_restarted();
        }
    }
}
