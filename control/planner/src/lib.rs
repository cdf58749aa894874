//! The planner: decides how many workers of each role a fleet needs to keep its service level with the fewest
//! GPUs.
//!
//! The crate is pure: observations and time are arguments, decisions with their reasons are results. Equal
//! input gives equal output. The crate knows no HTTP, no Kubernetes and no clock; `control/node` observes
//! gateways and carries decisions out.
//!
//! Reading order:
//! 1. `engine`: durations of an engine's steps, and the limits of its batch and its KV cache.
//! 2. `simulated_worker`, `capacity`: one worker in virtual time, and the most requests per second that it serves within
//!    the service level.
//! 3. `learned_engine`: the step times, corrected by measurements; `measured_engine`: step times from
//!    measurements of an engine alone.
//! 4. `demand`, `season`, `start_time`: the fleet's demand, now and when a new worker is ready.
//! 5. `planner`: demand over capacity, and the rules for following it; `budget`: counts of several roles
//!    within the available GPUs.
//! 6. `fleet_simulation`, `recorded_demand`, `headroom`: a whole fleet in virtual time under any scaling policy,
//!    recorded demand, and the headroom that it needs.
//! 7. `peer_policies`, `policy_comparison`: scaling policies of peers, and how they and the planner do on one demand.

#![forbid(unsafe_code)]

mod budget;
mod capacity;
mod demand;
mod engine;
mod fleet_simulation;
mod headroom;
mod learned_engine;
mod measured_engine;
pub mod peer_policies;
mod planner;
mod policy_comparison;
mod recorded_demand;
mod season;
mod simulated_worker;
mod start_time;

pub use capacity::{Capacity, Lengths};
pub use demand::forecast_error;
pub use engine::{Engine, ServiceLevel, StepTime, WorkerRole};
pub use fleet_simulation::{
    FleetView, Outcome, PlannerPolicy, Replica, Request, ScalingPolicy, Setup, poisson, simulate,
};
pub use headroom::{HEADROOMS, Headroom, Trial, choose as choose_headroom};
pub use measured_engine::{DecodeSample, MeasuredEngine, PromptSample, SAMPLES_MIN};
pub use planner::{
    CAPACITY_OF, Decision, LEVEL_WINDOW, Observation, Planner, PlannerConfig, PoolConfig, Reason,
    WorkerCounts,
};
pub use policy_comparison::{Comparison, PolicyResult, compare};
pub use recorded_demand::RecordedDemand;
