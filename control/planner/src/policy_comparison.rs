//! Comparison of scaling policies on one recorded demand: those of peers, the clairvoyant, and the planner.

use crate::peer_policies::{Clairvoyant, DynamoThreshold, KedaQueue, LlmdSlo, Static, TokenAware};
use crate::{Headroom, PlannerPolicy, Request, ScalingPolicy, Setup, Trial, choose_headroom, simulate};

/// A policy on the judged part of a trace.
#[derive(Debug)]
pub struct PolicyResult {
    /// The policy.
    pub name: &'static str,
    /// Share of requests within the service level.
    pub attained: f64,
    /// Mean number of workers.
    pub mean_workers: f64,
    /// Most workers at a time in the whole trace.
    pub peak: u32,
}

/// Policies on one trace.
#[derive(Debug)]
pub struct Comparison {
    /// Peers' policies, the clairvoyant, and the planner without and with a chosen headroom.
    pub rows: Vec<PolicyResult>,
    /// The headroom chosen.
    pub chosen: Headroom,
    /// Trials that the headroom was chosen from.
    pub trials: Vec<Trial>,
}

/// Puts a trace through all policies. The headroom is chosen on requests before `half` seconds; policies are judged after it.
#[must_use]
pub fn compare(setup: &Setup, requests: &[Request], capacity: f64, half: f64) -> Comparison {
    let first = &requests[..requests.partition_point(|request| request.at < half)];
    // The initial ramp from the minimum is not demand to learn from.
    let (chosen, trials) = choose_headroom(setup, first, half / 4.0);
    let end = requests.last().map_or(half, |request| request.at);
    let judge = |name: &'static str, policy: &mut dyn ScalingPolicy| {
        let outcome = simulate(setup, requests, policy);
        PolicyResult {
            name,
            attained: outcome.attained_from(requests, half),
            mean_workers: outcome.mean_workers_between(half, end.max(half + 1.0)),
            peak: outcome.peak,
        }
    };
    let rows = vec![
        judge("static, as many as allowed", &mut Static(setup.max)),
        judge("KEDA queue 1, running 16", &mut KedaQueue::default()),
        judge("llm-d SLO", &mut LlmdSlo::default()),
        judge("llm-d token-aware", &mut TokenAware::default()),
        judge("Dynamo threshold, throughput", &mut { DynamoThreshold::THROUGHPUT }),
        judge("Dynamo threshold, latency", &mut { DynamoThreshold::LATENCY }),
        judge("clairvoyant (no policy can be)", &mut Clairvoyant { capacity }),
        judge("Kvasir, nothing recorded", &mut PlannerPolicy::new(setup, Headroom::default())),
        judge("Kvasir, first half recorded", &mut PlannerPolicy::new(setup, chosen)),
    ];
    Comparison { rows, chosen, trials }
}
