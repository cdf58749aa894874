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
mod error;
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

pub use config::PlanConfig;
pub use error::PlanError;
pub use explore::{Exploration, ExplorationConfig};
pub use gate::{Admission, BandwidthGate, BandwidthLimit, Priority};
pub use give_up::{Waiting, give_up_after};
pub use planner::{Choice, Group, Piece, Plan, Request, plan};
pub use recompute::{PrefillGuess, RecomputeModel};
pub use returns::{ReturnConfig, ReturnTimes};
pub use speed::{SpeedSnapshot, TierSpeed, TierSpeeds};
pub use tier::{TIERS, Tier, TierSet};
