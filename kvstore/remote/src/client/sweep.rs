//! Timers of the client. No table is scanned before the earliest deadline, which is kept.

use std::collections::BTreeSet;
use std::time::Instant;

use dataplane_fabric::Fabric;

use super::RemotePool;
use super::fetch::Stage;
use super::operation::Operation;
use super::storing::PartStage;
use crate::NodeId;
use crate::breaker::BreakerState;
use crate::metrics::add;

impl<F: Fabric> RemotePool<F> {
    pub(super) fn sweep(&mut self, now: Instant) {
        if self.next_due.is_none_or(|due| due > now) {
            return;
        }
        self.sweep_requests(now);
        self.sweep_transfers(now);
        self.sweep_nodes(now);
        self.sweep_operations(now);
        self.next_due = self.earliest();
    }

    fn sweep_requests(&mut self, now: Instant) {
        let is_late = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let late: Vec<u64> = self
            .requests
            .iter()
            .filter(|(_, request)| is_late(request.timeout_at))
            .map(|(&id, _)| id)
            .collect();
        for id in late {
            // An earlier timeout may have ended the connection, and all requests on it.
            let Some(peer) = self.requests.get(&id).map(|request| request.peer) else { continue };
            let Some(request) = self.answered(id, peer) else { continue };
            if let Some(node) = self.nodes.get(&request.node) {
                add(&node.counters.timeouts, 1);
            }
            self.failed(request.node, now);
            self.unanswered(request.purpose, now);
        }
    }

    /// Ends connections with transfers that hang: the fabric completes those only when the connection ends.
    fn sweep_transfers(&mut self, now: Instant) {
        let timeout = self.config.transfer_timeout;
        let stuck: BTreeSet<NodeId> = self
            .transfers
            .values()
            .filter(|transfer| transfer.posted_at + timeout <= now)
            .filter(|transfer| self.node_of(transfer.peer) == Some(transfer.node))
            .map(|transfer| transfer.node)
            .collect();
        stuck.into_iter().for_each(|id| self.give_up(id, now));
    }

    fn sweep_nodes(&mut self, now: Instant) {
        let due = |node: &super::Node| node.breaker.deadline().is_some_and(|at| at <= now);
        let late: Vec<NodeId> = self.nodes.iter().filter(|(_, node)| due(node)).map(|(&id, _)| id).collect();
        for id in late {
            match self.nodes.get(&id).map(|node| node.breaker.state()) {
                Some(BreakerState::Open { .. }) => self.connect(id, now),
                Some(BreakerState::Probing { .. }) => self.give_up(id, now),
                Some(BreakerState::Closed) | None => {}
            }
        }
    }

    fn sweep_operations(&mut self, now: Instant) {
        let late: Vec<u64> = self
            .operations
            .iter()
            .filter(|(_, operation)| operation.due().is_some_and(|due| due <= now))
            .map(|(&ticket, _)| ticket)
            .collect();
        for ticket in late {
            match self.operations.get(&ticket) {
                Some(Operation::Fetch(fetch)) => {
                    match fetch.stage {
                        Stage::Held { .. } => add(&self.counters.totals.lost_leases, 1),
                        _ => add(&self.counters.totals.deadlines, 1),
                    }
                    self.end_fetch(ticket, now);
                }
                Some(Operation::Store(store)) if store.deadline <= now => {
                    add(&self.counters.totals.deadlines, 1);
                    self.end_store(ticket, now);
                }
                Some(Operation::Store(store)) => {
                    let late = |at: Option<Instant>| at.is_some_and(|at| at <= now);
                    let parts: Vec<usize> =
                        (0..store.parts.len()).filter(|&part| late(store.parts[part].write_until)).collect();
                    parts.into_iter().for_each(|part| self.commit_part(ticket, part, now));
                }
                None => {}
            }
        }
    }

    fn earliest(&self) -> Option<Instant> {
        let requests = self.requests.values().filter_map(|request| request.timeout_at);
        let transfers = self
            .transfers
            .values()
            .filter(|transfer| self.node_of(transfer.peer).is_some())
            .map(|transfer| transfer.posted_at + self.config.transfer_timeout);
        let nodes = self.nodes.values().filter_map(|node| node.breaker.deadline());
        let operations = self.operations.values().filter_map(Operation::due);
        requests.chain(transfers).chain(nodes).chain(operations).min()
    }
}

impl Operation {
    /// Deadline of the operation, or of one of its parts.
    fn due(&self) -> Option<Instant> {
        match self {
            Self::Fetch(fetch) => match fetch.stage {
                Stage::LookingUp | Stage::Reading => Some(fetch.deadline),
                Stage::Held { until } => Some(until),
                Stage::Draining => None,
            },
            Self::Store(store) => {
                let writing = store.parts.iter().filter(|part| part.stage == PartStage::Writing);
                writing.filter_map(|part| part.write_until).chain([store.deadline]).min()
            }
        }
    }
}
