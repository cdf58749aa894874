//! Outcomes of exchanges and numbers of cached tokens that the faults of a plan explain.
//!
//! A connection that was cut, and an exchange without an end, need a fault of their own gateway, or of the link between it
//! and the client. A refusal and a broken stream are explained by any fault that can fail a request, on any node, which
//! lasted until [`RECOVERS`] or [`RECOVERS_IN_SILENCE`] before the request or later: retries, health checks and breakers
//! carry its effect further than its end. A stop is also matched to the times of the exchange.

use std::collections::BTreeMap;

use crate::catalog::Exchange;
use crate::client::{ExchangeResult, Outcome};
use crate::kernel::{MILLISECOND, Nanos, SECOND};
use crate::nodes::DRAIN;
use crate::oracle::Oracle;
use crate::plan::{Action, BACK_WITHIN, Node, Plan, Step};

/// Time before its gateway's stop within which a new connection counts as accepted, in milliseconds.
const ACCEPTED_WITHIN: u64 = 1_000;

/// Time after the end of a fault within which a request may still fail because of it, in milliseconds: a breaker is open for
/// 30 s at most, and health checks take some seconds.
const RECOVERS: u64 = 45_000;

/// The same after a fault whose end no packet reported: connections are given up after 70 s.
const RECOVERS_IN_SILENCE: u64 = 120_000;

/// Time after the end of a fault of a gateway, or of the link to it, within which a connection may still be cut, in
/// milliseconds: a gateway takes some seconds to start.
const CUTS_WITHIN: u64 = 15_000;

/// Longest time of an answer without faults: the clients' questions are short, and few.
const ANSWERS_WITHIN: Nanos = 15 * SECOND;

/// Blocks of an engine that exceed the need of any run.
const ENOUGH_BLOCKS: usize = 4096;
const BLOCK_TOKENS: u64 = 16;

pub(crate) struct FaultEffects {
    steps: Vec<Step>,
    /// Whether no fault of the plan affects a client.
    has_no_client_fault: bool,
    /// Whether a decode worker reports tokens from its prefill worker as cached.
    has_pairs: bool,
    /// Whether there is one engine, with space for all blocks, and no fault.
    keeps_all_blocks: bool,
    /// Earliest time at which the first step was due.
    began: Nanos,
}

impl FaultEffects {
    pub(crate) fn new(plan: &Plan, began: Nanos) -> Self {
        Self {
            steps: plan.steps.clone(),
            has_no_client_fault: plan.has_no_client_fault(),
            has_pairs: plan.is_reference() && plan.has_pairs(),
            keeps_all_blocks: !plan.has_faults()
                && matches!(&plan.engines[..], [engine] if engine.blocks >= ENOUGH_BLOCKS),
            began,
        }
    }

    /// Returns the steps that had begun by `then`.
    fn before(&self, then: Nanos) -> impl Iterator<Item = &Step> {
        self.steps.iter().filter(move |step| self.began + step.at * MILLISECOND <= then)
    }

    /// Whether several engines may have computed parts of an answer that ended at this time: a request was sent twice.
    pub(crate) fn may_repeat(&self, ended: Nanos) -> bool {
        self.has_pairs
            || self.before(ended).any(|step| match step.action {
                Action::Ask { .. } | Action::Jump { .. } => false,
                Action::Leave { drains, .. } => !drains,
                _ => true,
            })
    }

    /// Returns the longest time that a correct answer may take, where a bound is known: no fault of the plan affects a
    /// client, and the client reads at once.
    pub(crate) fn answers_within(&self, number: usize) -> Option<Nanos> {
        match self.steps.get(number)?.action {
            Action::Ask { pause: 0, .. } if self.has_no_client_fault => Some(ANSWERS_WITHIN),
            _ => None,
        }
    }

    /// Whether the API server was out of reach for a time.
    pub(crate) fn hits_api_server(&self) -> bool {
        self.steps.iter().any(|step| step.action.hits_api_server())
    }

    /// Time at which a step was due.
    pub(crate) fn due(&self, number: usize) -> Nanos {
        self.began + self.steps.get(number).map_or(0, |step| step.at) * MILLISECOND
    }

    /// Returns the oracle that an outcome violates that no fault explains.
    pub(crate) fn violated(&self, number: usize, ended: &ExchangeResult) -> Oracle {
        let gateway = match self.steps.get(number).map(|step| &step.action) {
            Some(Action::Ask { gateway, .. }) => Some(Node::Gateway(*gateway)),
            _ => None,
        };
        let is_stopped = self
            .before(ended.at)
            .any(|step| matches!(&step.action, Action::Terminate { node, .. } if Some(*node) == gateway));
        match () {
            () if self.has_no_client_fault => Oracle::Service,
            () if is_stopped => Oracle::Drain,
            () => Oracle::Progress,
        }
    }

    /// Whether the faults explain the outcome of a step's exchange.
    pub(crate) fn explain(&self, number: usize, ended: &ExchangeResult) -> bool {
        let Some(Step { at, action: Action::Ask { gateway: asked, .. } }) = self.steps.get(number) else {
            return false;
        };
        let gateway = Node::Gateway(*asked);
        // Whether a step's effect had not ended when the request was sent.
        let lasts_until =
            |step: &Step, recovers: u64| step.at + step.action.lasts_at_most() + recovers >= *at;
        let any = |fits: &dyn Fn(&Action) -> bool| {
            self.before(ended.at).any(|step| {
                let recovers = if step.action.is_silent() { RECOVERS_IN_SILENCE } else { RECOVERS };
                lasts_until(step, recovers) && fits(&step.action)
            })
        };
        let joins = |a: &Node, b: &Node| [*a, *b].contains(&Node::Client) && [*a, *b].contains(&gateway);
        match &ended.outcome {
            Outcome::Correct | Outcome::ClientLeft => true,
            Outcome::Wrong(..) => false,
            _ if self.has_no_client_fault => false,
            // A fault on the path to this gateway, or of the gateway itself.
            Outcome::Cut => self.before(ended.at).any(|step| match &step.action {
                Action::Kill { node, .. } | Action::Freeze { node, .. } => {
                    *node == gateway && lasts_until(step, CUTS_WITHIN)
                }
                Action::Cut { a, b, .. } | Action::Partition { a, b, .. } | Action::Degrade { a, b, .. } => {
                    joins(a, b) && lasts_until(step, CUTS_WITHIN)
                }
                // Requests that a gateway has when it is told to stop end normally, within its drain time.
                Action::Terminate { node, kill_after } => {
                    let drains_for = (*kill_after).min(DRAIN.as_millis() as u64);
                    let was_late = *at + ACCEPTED_WITHIN > step.at;
                    *node == gateway
                        && *at < step.at + kill_after + BACK_WITHIN
                        && (was_late || ended.at >= self.began + (step.at + drains_for) * MILLISECOND)
                }
                _ => false,
            }),
            // The gateway's machine lost power, or the connection was dropped silently: the client gets no
            // reset.
            Outcome::TimedOut => any(&|action| match action {
                Action::Kill { node, silently, .. } => *silently && *node == gateway,
                Action::Cut { a, b, silently } => *silently && joins(a, b),
                _ => false,
            }),
            // The mock engine's injected error, relayed.
            Outcome::Refused(500) => any(&|action| match action {
                Action::Misbehave { kind, .. } => kind == "error",
                _ => false,
            }),
            Outcome::Refused(status) => {
                // A restarted gateway knows no workers until the API server answers.
                let finds_none =
                    any(&|action| matches!(action, Action::Terminate { node: Node::Gateway(_), .. }))
                        && any(&Action::hits_api_server);
                matches!(status, 429 | 502..=504) && (finds_none || any(&Action::fails_requests))
            }
            Outcome::Broken => any(&Action::fails_requests),
        }
    }

    /// Returns the fewest prompt tokens of a step that must have been cached: those that a single engine,
    /// which forgets nothing, has from finished correct requests of the same tenant. `right` has the ends of
    /// such requests by their steps.
    pub(crate) fn cached_min(
        &self,
        number: usize,
        right: &BTreeMap<usize, Nanos>,
        catalog: &[Vec<Exchange>],
    ) -> u64 {
        if !self.keeps_all_blocks {
            return 0;
        }
        let step = &self.steps[number];
        let asked_at = self.began + step.at * MILLISECOND;
        let earlier =
            right.iter().filter(|(_, ended)| **ended < asked_at).map(|(number, _)| &self.steps[*number]);
        // The last token is always computed.
        self.shared(step, earlier, catalog).saturating_sub(1) / BLOCK_TOKENS * BLOCK_TOKENS
    }

    /// Returns the most tokens that the prompt of a step has in common with earlier steps of its tenant,
    /// their answers included.
    fn shared<'a>(
        &self,
        step: &Step,
        others: impl Iterator<Item = &'a Step>,
        catalog: &[Vec<Exchange>],
    ) -> u64 {
        let asked = |step: &Step| match step.action {
            Action::Ask { conversation, turn, tenant, .. } => Some((&catalog[conversation][turn], tenant)),
            _ => None,
        };
        let Some((own, tenant)) = asked(step) else { return 0 };
        let prompt = &own.tokens[..own.prompt_tokens as usize];
        let in_common =
            |other: &Exchange| prompt.iter().zip(&other.tokens).take_while(|(a, b)| a == b).count() as u64;
        others
            .filter_map(asked)
            .filter(|(_, other)| *other == tenant)
            .map(|(other, _)| in_common(other))
            .max()
            .unwrap_or(0)
    }

    /// Returns the most prompt tokens of a step that an engine can have had in its cache, if known: those
    /// that requests of the same tenant have left there.
    pub(crate) fn cached_max(
        &self,
        number: usize,
        ended: &ExchangeResult,
        catalog: &[Vec<Exchange>],
    ) -> Option<u64> {
        if self.may_repeat(ended.at) {
            return None;
        }
        let others = self
            .steps
            .iter()
            .enumerate()
            .filter(|(other, step)| *other != number && self.began + step.at * MILLISECOND <= ended.at);
        Some(self.shared(self.steps.get(number)?, others.map(|(_, step)| step), catalog))
    }
}
