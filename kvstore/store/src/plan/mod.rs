//! Whether, from where and how far to onboard a prefix: a tier is used only when it wins against recomputing.
//!
//! * [`TierSpeeds`] and [`RecomputeModel`] learn times from what happens.
//! * [`plan`] chooses, for one request, how many leading blocks are onboarded and from which tier each comes,
//!   and when to stop waiting for them. Its header derives what that can cost at most.
//! * [`Exploration`] names small reads off the critical path, so that unused tiers stay known.
//! * [`BandwidthGate`] keeps background traffic within a tier's budget and behind what decoding waits for.
//! * [`ReturnTimes`] says whether an idle conversation is likely to go on.
//!
//! Pure arithmetic: no thread, no clock, no I/O. Time is an argument everywhere. Planning runs once a
//! request and allocates the pieces that it returns; the rest allocates nothing. This module knows tiers, blocks
//! and tokens as numbers; it knows nothing of slots, files, workers or HTTP.

mod config;
mod explore;
mod gate;
mod give_up;
mod learner;
mod least_squares;
mod placement;
mod planner;
mod recompute;
mod returns;
mod speed;
#[cfg(test)]
mod tests;
mod tier;

pub(crate) use config::PlanConfig;
pub(crate) use explore::{Exploration, ExplorationConfig};
pub use gate::BandwidthLimit;
pub(crate) use gate::{Admission, BandwidthGate, Priority};
pub(crate) use planner::{Choice, Group, Request, loadable, plan};
pub(crate) use recompute::{PrefillEstimate, RecomputeModel};
pub use returns::ReturnConfig;
pub(crate) use returns::ReturnTimes;
pub(crate) use speed::TierSpeeds;
pub use tier::Tier;
pub(crate) use tier::{TIERS, TierSet};
