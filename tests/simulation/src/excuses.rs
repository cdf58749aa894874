//! Ends of exchanges and cached tokens that a plan's faults explain.
//!
//! A fault explains every end that comes after its beginning, wherever it is; only being told to stop is compared with the
//! gateway and the times of the exchange.

use std::collections::BTreeMap;

use crate::catalog::Exchange;
use crate::client::{Ended, Outcome};
use crate::kernel::{MILLISECOND, Nanos};
use crate::nodes::DRAIN;
use crate::plan::{Action, Node, Plan, Step};

/// A connection made this long before its gateway is told to stop counts as accepted, in milliseconds.
const ACCEPTED_WITHIN: u64 = 1_000;

/// A gateway is back so long after it was to be killed at the latest, in milliseconds.
const BACK_WITHIN: u64 = 10_000;

/// Blocks of an engine that no run fills.
const ENOUGH_BLOCKS: usize = 4096;
const BLOCK_TOKENS: u64 = 16;

pub(crate) struct Excuses {
    steps: Vec<Step>,
    /// Nothing that happens is felt by a client.
    interrupts_nothing: bool,
    /// An engine may have computed the beginning of an answer that another one gave.
    may_repeat: bool,
    /// There is one engine, which has room for all blocks, and no fault.
    forgets_nothing: bool,
    /// When the first step was due at the earliest.
    began: Nanos,
}

impl Excuses {
    pub(crate) fn new(plan: &Plan, began: Nanos) -> Self {
        Self {
            steps: plan.steps.clone(),
            interrupts_nothing: plan.interrupts_nothing(),
            // A decode worker counts what came from its prefill worker.
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

    /// Steps that had begun by then.
    fn before(&self, then: Nanos) -> impl Iterator<Item = &Step> {
        self.steps.iter().filter(move |step| self.began + step.at * MILLISECOND <= then)
    }

    /// Whether several engines may have had a part in an answer.
    pub(crate) fn may_repeat(&self) -> bool {
        self.may_repeat
    }

    /// Whether the faults explain how the exchange of a step ended.
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
            // Something on the way to this gateway, or the gateway itself.
            Outcome::Cut => self.before(ended.at).any(|step| match &step.action {
                Action::Kill { node, .. } | Action::Freeze { node, .. } => *node == gateway,
                Action::Cut { a, b, .. } | Action::Partition { a, b, .. } | Action::Degrade { a, b, .. } => {
                    joins(a, b)
                }
                // What is there when it is told to stop ends as if nothing had happened, within the time for it.
                Action::Terminate { node, kill_after } => {
                    let drains_for = (*kill_after).min(DRAIN.as_millis() as u64);
                    let was_late =
                        *at + ACCEPTED_WITHIN > step.at && *at < step.at + kill_after + BACK_WITHIN;
                    *node == gateway
                        && (was_late || ended.at >= self.began + (step.at + drains_for) * MILLISECOND)
                }
                _ => false,
            }),
            // The gateway's machine lost power, or the connection was forgotten: the client gets no reset.
            Outcome::GaveUp => any(&|action| match action {
                Action::Kill { node, silently, .. } => *silently && *node == gateway,
                Action::Cut { a, b, silently } => *silently && joins(a, b),
                _ => false,
            }),
            // The mock engine's injected error, passed on.
            Outcome::Refused(500) => any(&|action| match action {
                Action::Misbehave { kind, .. } => kind == "error",
                _ => false,
            }),
            Outcome::Refused(status) => {
                // A gateway that has just started knows no workers as long as nobody tells it of them.
                let finds_none =
                    any(&|action| matches!(action, Action::Terminate { node: Node::Gateway(_), .. }))
                        && any(&Action::hits_api_server);
                matches!(status, 429 | 502..=504) && (finds_none || any(&Action::fails_requests))
            }
            Outcome::Broken => any(&Action::fails_requests),
        }
    }

    /// Fewest tokens of the prompt of a step that must have been cached: those that one engine, which forgets nothing, has got
    /// from requests of the same tenant that had ended rightly. `right` has the ends of such requests by their steps.
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

    /// Most tokens that the prompt of a step has in common with those of steps of its tenant, their answers included.
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

    /// Most tokens of the prompt of a step that an engine can have had in its cache, if that is known: those that requests
    /// of the same tenant have left there.
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
