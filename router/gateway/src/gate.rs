//! Limits the gate of each pool to what its engines can take: engines queue first in, first out, so
//! requests wait in the gateway's queue, which is fair. `router_fleet::Capacity` knows how many requests a
//! worker can take.

use std::sync::Weak;
use std::time::Duration;

use router_engines::dialect::Role;
use router_fleet::Pool;

use crate::service::Gateway;

/// Interval at which gates are set.
const SET_EVERY: Duration = Duration::from_millis(100);

/// Returns the number of requests that the ready workers of a pool can take from this gateway; `None` when
/// no worker is ready. Prefill workers are not counted: their requests are counted at the decode workers.
fn places(pool: &Pool) -> Option<u32> {
    let roster = pool.roster();
    let ready = roster.iter().filter(|rank| rank.is_ready() && rank.run.role != Role::Prefill);
    ready.map(|rank| rank.run.capacity.share(rank.run.load.peers.get()[0])).reduce(u32::saturating_add)
}

/// Sets the gates, each to at most its pool's `requests_max`, until the gateway is dropped.
pub(crate) async fn keep(gateway: Weak<Gateway>) {
    loop {
        tokio::time::sleep(SET_EVERY).await;
        let Some(gateway) = gateway.upgrade() else { return };
        // Without a queue of its own the gateway would refuse requests that engines could queue.
        if !gateway.config.follows_engines || gateway.config.access.waiting_max == 0 {
            return;
        }
        for model in gateway.models.iter() {
            // While no worker is ready, the gate keeps its width.
            let Some(places) = places(&model.pool) else { continue };
            let next = places.clamp(1, model.requests_max);
            if model.gate.running_max() != next {
                model.gate.set_running_max(next);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use router_access::{AdmissionRequest, Entry, Gate, GateConfig, Permit, Wait, WaitOutcome};
    use router_engines::dialect::EngineLoad;
    use router_fleet::Capacity;

    use super::*;

    /// Requests that an engine of the simulation runs at a time.
    const PLACES: usize = 32;
    /// Ticks of 100 ms that a request runs.
    const RUNS_FOR: u32 = 10;
    /// Ticks between two reports.
    const REPORT_EVERY: u32 = 10;

    struct Request {
        is_urgent: bool,
        left: u32,
        permit: Permit,
    }

    /// An engine that runs up to `PLACES` requests at a time and queues more, first in, first out.
    #[derive(Default)]
    struct Engine {
        running: Vec<Request>,
        waiting: VecDeque<Request>,
        capacity: Capacity,
    }

    impl Engine {
        fn inside(&self) -> usize {
            self.running.len() + self.waiting.len()
        }

        fn load(&self) -> EngineLoad {
            let (running, waiting) = (self.running.len() as u32, self.waiting.len() as u32);
            EngineLoad { running, waiting, kv_usage: 0.0 }
        }
    }

    struct Run {
        gate: Arc<Gate>,
        engines: [Engine; 2],
        /// Requests in the gateway's queue.
        queue: Vec<(bool, Wait)>,
        tick: u32,
        served: u32,
        /// When the urgent request began to run.
        urgent_at: Option<u32>,
    }

    impl Run {
        fn new() -> Self {
            let wait_max = Duration::from_secs(3600);
            let config = GateConfig { running_max: 4096, wait_max, ..GateConfig::default() };
            let gate = Gate::new(config).expect("a gate");
            let engines = [Engine::default(), Engine::default()];
            Self { gate, engines, queue: Vec::new(), tick: 0, served: 0, urgent_at: None }
        }

        fn now(&self) -> u64 {
            u64::from(self.tick) * 100_000_000
        }

        fn ask(&mut self, is_urgent: bool) {
            let tenant: Arc<str> = if is_urgent { "chat".into() } else { "batch".into() };
            let priority = if is_urgent { 0 } else { 1 };
            let ask =
                AdmissionRequest { tenant: &tenant, priority, weight: 1, cost: 100, deadline: u64::MAX };
            match self.gate.enter(&ask, self.now()) {
                Entry::Admitted(permit) => self.send(is_urgent, permit),
                Entry::Waiting(wait) => self.queue.push((is_urgent, wait)),
                Entry::Full(refusal) => panic!("refused: {refusal:?}"),
            }
        }

        /// Sends the request to the engine that has fewer requests.
        fn send(&mut self, is_urgent: bool, permit: Permit) {
            let which = usize::from(self.engines[1].inside() < self.engines[0].inside());
            self.engines[which].waiting.push_back(Request { is_urgent, left: RUNS_FOR, permit });
        }

        fn step(&mut self, follows_engines: bool) {
            self.tick += 1;
            let now = self.now();
            let mut ended = Vec::new();
            for engine in &mut self.engines {
                engine.running.iter_mut().for_each(|request| request.left -= 1);
                ended.extend(engine.running.extract_if(.., |request| request.left == 0));
            }
            self.served += ended.len() as u32;
            for request in ended {
                request.permit.release(now);
                // The batch never ends: each finished request is followed by another.
                self.ask(false);
            }
            if follows_engines && self.tick.is_multiple_of(REPORT_EVERY) {
                let limits = self.engines.iter().map(|engine| {
                    engine.capacity.report(&engine.load(), None, engine.inside() as u32);
                    engine.capacity.share(0)
                });
                let places = limits.fold(0, u32::saturating_add);
                self.gate.set_running_max(places.min(4096));
            }
            for (is_urgent, mut wait) in std::mem::take(&mut self.queue) {
                match wait.try_take() {
                    Some(WaitOutcome::Admitted(permit)) => self.send(is_urgent, permit),
                    Some(WaitOutcome::Expired) => panic!("there is no deadline"),
                    None => self.queue.push((is_urgent, wait)),
                }
            }
            self.start();
        }

        fn start(&mut self) {
            for engine in &mut self.engines {
                while engine.running.len() < PLACES
                    && let Some(request) = engine.waiting.pop_front()
                {
                    if request.is_urgent {
                        self.urgent_at = Some(self.tick);
                    }
                    engine.running.push(request);
                }
            }
        }
    }

    /// Returns the ticks from an urgent request to its first step, in a fleet that has been full for two
    /// minutes, and the number of requests served.
    fn urgent_among_600(follows_engines: bool) -> (u32, u32) {
        let mut run = Run::new();
        (0..600).for_each(|_| run.ask(false));
        (0..1200).for_each(|_| run.step(follows_engines));
        run.ask(true);
        let asked = run.tick;
        while run.urgent_at.is_none() {
            run.step(follows_engines);
        }
        (run.urgent_at.map_or(0, |at| at - asked), run.served)
    }

    #[test]
    fn an_urgent_request_waits_for_a_place_and_not_for_the_engines_queues() {
        let (wait, served) = urgent_among_600(true);
        let (wait_inert, served_inert) = urgent_among_600(false);
        println!(
            "waits {} s, {} s in the engines' queues",
            f64::from(wait) / 10.0,
            f64::from(wait_inert) / 10.0
        );
        assert!(wait_inert > 60, "the control: the engines' queues are long");
        assert!(wait <= 2 * RUNS_FOR + 5, "{wait} ticks");
        // The narrower gate leaves no engine idle.
        let most = 1200 / RUNS_FOR * 2 * PLACES as u32;
        assert!(
            served * 20 >= most * 19 && served_inert * 20 >= most * 19,
            "{served}, {served_inert} of {most}"
        );
        assert_eq!(urgent_among_600(true), (wait, served), "equal seed, equal run");
    }
}
