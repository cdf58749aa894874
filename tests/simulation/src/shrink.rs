//! Reduces a failing plan to the fewest steps and nodes that still fail.

use anyhow::Result;

use crate::plan::{Action, Plan};
use crate::runner::{RunOutput, Runner, Verdict};

/// Kind of a failure: the oracle, and the text before the first number.
pub(crate) fn kind_of(reason: &str) -> &str {
    let end = reason.find(|letter: char| letter.is_ascii_digit()).unwrap_or(reason.len());
    &reason[..end]
}

/// Returns the smallest plan found that fails in the same way as `plan`, with its reason. Delta debugging
/// (Zeller and Hildebrandt, IEEE TSE 2002) over the steps.
pub(crate) fn shrink(runner: &Runner, plan: &Plan, reason: &str) -> Result<(Plan, String)> {
    let (mut best, mut best_reason) = (plan.clone(), reason.to_owned());
    let mut tries = 0;
    let mut fails = |candidate: &Plan| -> Result<Option<String>> {
        tries += 1;
        if tries > TRIES_MAX {
            return Ok(None);
        }
        Ok(match runner.run_one(candidate, RunOutput::default())? {
            Verdict::Failed(found) if kind_of(&found) == kind_of(reason) => Some(found),
            _ => None,
        })
    };
    let mut chunk = best.steps.len().div_ceil(2);
    while chunk > 0 && !best.steps.is_empty() {
        let mut begin = 0;
        while begin < best.steps.len() {
            let mut candidate = best.clone();
            candidate.steps.drain(begin..(begin + chunk).min(best.steps.len()));
            match fails(&candidate)? {
                Some(found) => (best, best_reason) = (candidate, found),
                None => begin += chunk,
            }
        }
        chunk /= 2;
    }
    // Replaces clients with well-behaved ones, as long as the plan still fails.
    for index in 0..best.steps.len() {
        let mut candidate = best.clone();
        if let Action::Ask { leaves_after, pause, .. } = &mut candidate.steps[index].action {
            (*leaves_after, *pause) = (None, 0);
        }
        if candidate != best
            && let Some(found) = fails(&candidate)?
        {
            (best, best_reason) = (candidate, found);
        }
    }
    Ok((best, best_reason))
}

/// Most runs of one shrinking.
const TRIES_MAX: usize = 150;
