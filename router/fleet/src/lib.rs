//! The workers behind a gateway, as a fleet that changes while it runs: who they are, how they are, what they hold and do,
//! and which of them gets a request.
//!
//! Reading order: `spec` (the roster that is wanted), `changes` (what administrators want, agreed on among gateways),
//! `fleet` (making itself equal to the roster), `pool` (a model and its workers), `served_model` (which model that is),
//! `state` and `worker` (one of them), `join` (its runs in the index), `health` and `report` (asking it), `sleep` (putting it to sleep and waking it), `capacity`, `load`
//! and `breaker` (what it can take, does, and fails), `stores` (that workers share), `peers` (other gateways), `snapshots` (a warm start), `route` and
//! `booking` (who gets a request), `decisions` (what was decided), `routed` and `poll` (workers without events, and with
//! events that must be asked for).
//!
//! Requests read atomics and one `ArcSwap` a decision; everything that changes the fleet runs in tasks of its own.

#![forbid(unsafe_code)]

mod booking;
mod breaker;
mod capacity;
mod changes;
mod config;
mod decisions;
mod fleet;
mod health;
mod join;
mod load;
mod order;
mod peers;
mod poll;
mod pool;
mod report;
mod roster;
mod route;
mod routed;
mod served_model;
mod sleep;
mod snapshots;
mod spec;
mod state;
mod stores;
#[cfg(feature = "testing")]
pub mod testing;
mod worker;

pub use booking::Booking;
pub use breaker::{Breaker, RetryBudget};
pub use capacity::Capacity;
pub use changes::{AddedWorker, Changes, DesiredState};
pub use config::{FleetConfig, PoolConfig, RoutingPolicy};
pub use decisions::Decisions;
pub use fleet::{Discovered, Fleet, RosterDelta, Workers};
pub use load::{Counts, LearnedCoefficients, Load, PredictionAccuracy};
pub use peers::{PeerMessageSource, SharedState};
pub use pool::Pool;
pub use roster::Roster;
pub use route::{Chooser, Route, RouteRequest};
pub use sleep::{SLEEP_REQUEST_MAX, SleepError};
pub use spec::{AsleepRun, DEFAULT_POOL, FleetSpec, SpecError, WORKERS_MAX, WorkerSpec, name_of};
pub use state::WorkerState;
pub use stores::{GroupStatus, StoreStatus, Stores};
pub use worker::{RankRef, ReportedLoad, Worker, WorkerRun, able_to_decode};
