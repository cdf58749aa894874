//! Ends of exchanges and cached tokens that a plan's faults explain.
//!
//! A fault explains an end wherever and whenever it is in the plan; only being told to stop is compared with the times of the
//! exchange.

use crate::catalog::Exchange;
use crate::client::{Ended, Outcome};
use crate::kernel::{MILLISECOND, Nanos};
use crate::nodes::DRAIN;
use crate::plan::{Action, Node, Plan, Step};

/// A connection made this long before its gateway is told to stop counts as accepted, in milliseconds.
const ACCEPTED_WITHIN: u64 = 1_000;

pub(crate) struct Excuses {
    steps: Vec<Step>,
    /// Nothing that happens is felt by a client.
    interrupts_nothing: bool,
    /// An engine may have computed the beginning of an answer that another one gave.
    may_repeat: bool,
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
            began,
        }
    }

    fn any(&self, fits: impl Fn(&Action) -> bool) -> bool {
        self.steps.iter().any(|step| fits(&step.action))
    }

    /// Whether the faults explain how the exchange of a step ended.
    pub(crate) fn explain(&self, number: usize, ended: &Ended) -> bool {
        let Some(Step { at, action: Action::Ask { gateway: asked, .. } }) = self.steps.get(number) else {
            return false;
        };
        let gateway = Node::Gateway(*asked);
        let joins = |a: &Node, b: &Node| [*a, *b].contains(&Node::Client) && [*a, *b].contains(&gateway);
        match &ended.outcome {
            Outcome::Right | Outcome::Left => true,
            Outcome::Wrong(_) => false,
            _ if self.interrupts_nothing => false,
            // Something on the way to this gateway, or the gateway itself.
            Outcome::Cut => self.steps.iter().any(|step| match &step.action {
                Action::Kill { node, .. } | Action::Freeze { node, .. } => *node == gateway,
                Action::Cut { a, b, .. } | Action::Partition { a, b, .. } | Action::Degrade { a, b, .. } => {
                    joins(a, b)
                }
                // What is there when it is told to stop ends as if nothing had happened, within the time for it.
                Action::Terminate { node, kill_after } => {
                    let drains_for = (*kill_after).min(DRAIN.as_millis() as u64);
                    let was_late = *at + ACCEPTED_WITHIN > step.at;
                    *node == gateway
                        && (was_late || ended.at >= self.began + (step.at + drains_for) * MILLISECOND)
                }
                _ => false,
            }),
            // The gateway's machine lost power, or the connection was forgotten: the client gets no reset.
            Outcome::GaveUp => self.any(|action| match action {
                Action::Kill { node, silently, .. } => *silently && *node == gateway,
                Action::Cut { a, b, silently } => *silently && joins(a, b),
                _ => false,
            }),
            // The mock engine's injected error, passed on.
            Outcome::Refused(500) => self.any(|action| match action {
                Action::Misbehave { kind, .. } => kind == "error",
                _ => false,
            }),
            Outcome::Refused(status) => matches!(status, 429 | 502..=504) && self.any(Action::fails_requests),
            Outcome::Broken => self.any(Action::fails_requests),
        }
    }

    /// Most tokens of the prompt of a step that an engine can have had in its cache, if that is known: those that requests
    /// of the same tenant have left there.
    pub(crate) fn cached_max(&self, number: usize, ended: &Ended, catalog: &[Vec<Exchange>]) -> Option<u64> {
        if self.may_repeat {
            return None;
        }
        let asked = |step: &Step| match step.action {
            Action::Ask { conversation, turn, tenant, .. } => Some((conversation, turn, tenant)),
            _ => None,
        };
        let (conversation, turn, tenant) = asked(self.steps.get(number)?)?;
        let own = &catalog[conversation][turn];
        let prompt = &own.tokens[..own.prompt_tokens as usize];
        let others = self
            .steps
            .iter()
            .enumerate()
            .filter(|(other, step)| *other != number && self.began + step.at * MILLISECOND <= ended.at);
        let shared = others.filter_map(|(_, step)| asked(step)).filter(|(.., other)| *other == tenant).map(
            |(conversation, turn, _)| {
                let other = &catalog[conversation][turn].tokens;
                prompt.iter().zip(other).take_while(|(a, b)| a == b).count() as u64
            },
        );
        Some(shared.max().unwrap_or(0))
    }
}
