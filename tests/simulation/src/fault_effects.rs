//! Outcomes of exchanges and numbers of cached tokens that the faults of a plan explain.
//!
//! A fault explains every outcome after its beginning, wherever it occurs; only a stop is matched to the
//! gateway and the times of the exchange.

use std::collections::BTreeMap;

use crate::catalog::Exchange;
use crate::client::{Ended, Outcome};
use crate::kernel::{MILLISECOND, Nanos};
use crate::nodes::DRAIN;
use crate::plan::{Action, Node, Plan, Step};

/// Time before its gateway's stop within which a new connection counts as accepted, in milliseconds.
const ACCEPTED_WITHIN: u64 = 1_000;

/// Longest time from the end of a gateway's `kill_after` until it is back, in milliseconds.
const BACK_WITHIN: u64 = 10_000;

/// Blocks of an engine that exceed the need of any run.
const ENOUGH_BLOCKS: usize = 4096;
const BLOCK_TOKENS: u64 = 16;

pub(crate) struct FaultEffects {
    steps: Vec<Step>,
    /// Whether no fault of the plan affects a client.
    interrupts_nothing: bool,
    /// Whether several engines may have computed parts of one answer.
    may_repeat: bool,
    /// Whether there is one engine, with space for all blocks, and no fault.
    forgets_nothing: bool,
    /// Earliest time at which the first step was due.
    began: Nanos,
}

impl FaultEffects {
    pub(crate) fn new(plan: &Plan, began: Nanos) -> Self {
        Self {
            steps: plan.steps.clone(),
            interrupts_nothing: plan.interrupts_nothing(),
            // A decode worker reports tokens from its prefill worker as cached.
            may_repeat: plan.is_reference() && plan.has_pairs()
                || plan.steps.iter().any(|step| match step.action {
                    Action::Ask { .. } | Action::Jump { .. } => false,
                    Action::Leave { drains, .. } => !drains,
                    _ => true,
                }),
            forgets_nothing: !plan.has_faults()
                && matches!(&plan.engines[..], [engine] if engine.blocks >= ENOUGH_BLOCKS),
            began,
        }
    }

    /// Returns the steps that had begun by `then`.
    fn before(&self, then: Nanos) -> impl Iterator<Item = &Step> {
        self.steps.iter().filter(move |step| self.began + step.at * MILLISECOND <= then)
    }

    /// Whether several engines may have computed parts of one answer.
    pub(crate) fn may_repeat(&self) -> bool {
        self.may_repeat
    }

    /// Whether the faults explain the outcome of a step's exchange.
    pub(crate) fn explain(&self, number: usize, ended: &Ended) -> bool {
        let Some(Step { at, action: Action::Ask { gateway: asked, .. } }) = self.steps.get(number) else {
            return false;
        };
        let gateway = Node::Gateway(*asked);
        let any = |fits: &dyn Fn(&Action) -> bool| self.before(ended.at).any(|step| fits(&step.action));
        let joins = |a: &Node, b: &Node| [*a, *b].contains(&Node::Client) && [*a, *b].contains(&gateway);
        match &ended.outcome {
            Outcome::Right | Outcome::Left => true,
            Outcome::Wrong(_) => false,
            _ if self.interrupts_nothing => false,
            // A fault on the path to this gateway, or of the gateway itself.
            Outcome::Cut => self.before(ended.at).any(|step| match &step.action {
                Action::Kill { node, .. } | Action::Freeze { node, .. } => *node == gateway,
                Action::Cut { a, b, .. } | Action::Partition { a, b, .. } | Action::Degrade { a, b, .. } => {
                    joins(a, b)
                }
                // Requests that a gateway has when it is told to stop end normally, within its drain time.
                Action::Terminate { node, kill_after } => {
                    let drains_for = (*kill_after).min(DRAIN.as_millis() as u64);
                    let was_late =
                        *at + ACCEPTED_WITHIN > step.at && *at < step.at + kill_after + BACK_WITHIN;
                    *node == gateway
                        && (was_late || ended.at >= self.began + (step.at + drains_for) * MILLISECOND)
                }
                _ => false,
            }),
            // The gateway's machine lost power, or the connection was dropped silently: the client gets no
            // reset.
            Outcome::GaveUp => any(&|action| match action {
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
        if !self.forgets_nothing {
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
    pub(crate) fn cached_max(&self, number: usize, ended: &Ended, catalog: &[Vec<Exchange>]) -> Option<u64> {
        if self.may_repeat {
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
