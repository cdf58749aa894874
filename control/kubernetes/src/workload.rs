//! Counts of a workload's workers by the state of their pods. No I/O.
//!
//! | Pod | Counts as |
//! | --- | --- |
//! | `Succeeded`, `Failed` | nothing |
//! | with a `deletionTimestamp` | draining |
//! | whose `Ready` condition is `True` | ready |
//! | else | starting, since it was created, or since it was last ready |
//!
//! Replicas without a pod (a quota, a slow controller) count as starting since they were first missing.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;

/// The present worker counts of a workload.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WorkloadCounts {
    /// Replicas that the workload is set to.
    pub replicas: u32,
    /// Pods that take requests.
    pub ready: u32,
    /// For each starting worker: seconds since it was requested.
    pub starting_for: Vec<f64>,
    /// Pods that are being deleted.
    pub draining: u32,
    /// For each worker that became ready since the last count: seconds since it was requested.
    pub started_in: Vec<f64>,
    /// For each starting pod that reports why it cannot start: `NAME: REASON`.
    pub reasons: Vec<String>,
    /// Resource version of the workload, which a change of its replicas carries.
    pub version: String,
}

/// State that is kept between two counts.
#[derive(Debug, Default)]
pub(crate) struct PodCounter {
    /// UIDs of pods that were ready at some time.
    were_ready: HashSet<String>,
    /// UIDs of pods that were seen starting.
    were_starting: HashSet<String>,
    missed_since: Option<Timestamp>,
}

fn seconds(from: Timestamp, now: Timestamp) -> f64 {
    (now.as_millisecond() - from.as_millisecond()).max(0) as f64 / 1e3
}

impl PodCounter {
    /// Counts the pods of a workload that is set to `replicas`.
    pub(crate) fn count(&mut self, replicas: u32, pods: &[Pod], now: Timestamp) -> WorkloadCounts {
        let mut counts = WorkloadCounts { replicas, ..WorkloadCounts::default() };
        let mut uids = HashSet::new();
        let no_status = PodStatus::default();
        for pod in pods {
            let status = pod.status.as_ref().unwrap_or(&no_status);
            if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
                continue;
            }
            if pod.metadata.deletion_timestamp.is_some() {
                counts.draining += 1;
                continue;
            }
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            let ready = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready");
            let changed = ready.and_then(|ready| ready.last_transition_time.as_ref()).map(|time| time.0);
            let made = pod.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
            if ready.is_some_and(|ready| ready.status == "True") {
                counts.ready += 1;
                if self.were_starting.contains(&uid) && !self.were_ready.contains(&uid) {
                    counts.started_in.push(seconds(made, changed.unwrap_or(now)));
                }
                self.were_ready.insert(uid.clone());
            } else {
                let was_ready = self.were_ready.contains(&uid);
                let since = if was_ready { changed.unwrap_or(made) } else { made };
                counts.starting_for.push(seconds(since, now));
                let name = pod.metadata.name.as_deref().unwrap_or_default();
                counts.reasons.extend(reason(status).map(|reason| format!("{name}: {reason}")));
                self.were_starting.insert(uid.clone());
            }
            uids.insert(uid);
        }
        let exist = counts.ready + counts.starting_for.len() as u32;
        if exist < replicas {
            let since = *self.missed_since.get_or_insert(now);
            counts.starting_for.extend((exist..replicas).map(|_| seconds(since, now)));
        } else {
            self.missed_since = None;
        }
        // Deleted pods are dropped.
        self.were_ready.retain(|uid| uids.contains(uid));
        self.were_starting.retain(|uid| uids.contains(uid));
        counts
    }
}

/// Returns the reason why a pod does not become ready, if its status contains one.
fn reason(status: &PodStatus) -> Option<String> {
    let told = |reason: Option<&str>, message: Option<&str>| match (reason, message) {
        (Some(reason), Some(message)) => Some(format!("{reason}: {message}")),
        (reason, message) => reason.or(message).map(str::to_owned),
    };
    let scheduled = status.conditions.iter().flatten().find(|condition| condition.type_ == "PodScheduled");
    if let Some(condition) = scheduled.filter(|condition| condition.status == "False") {
        return told(condition.reason.as_deref(), condition.message.as_deref());
    }
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let waiting = containers.filter_map(|container| container.state.as_ref()?.waiting.as_ref());
    let is_failure = |reason: &str| !["ContainerCreating", "PodInitializing"].contains(&reason);
    let mut failing = waiting.filter(|waiting| waiting.reason.as_deref().is_some_and(is_failure));
    failing.next().and_then(|waiting| told(waiting.reason.as_deref(), waiting.message.as_deref()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(uid: &str, made: &str, status: Value) -> Pod {
        let pod = json!({"metadata": {"name": uid, "uid": uid, "creationTimestamp": made}, "status": status});
        serde_json::from_value(pod).expect("a pod")
    }

    fn ready(is: &str, since: &str) -> Value {
        json!({"phase": "Running", "conditions": [{"type": "Ready", "status": is, "lastTransitionTime": since}]})
    }

    fn at(text: &str) -> Timestamp {
        text.parse().expect("a time")
    }

    #[test]
    fn pods_are_counted_by_their_state_and_starts_are_measured_once() {
        let (t0, t1, t2) = ("2026-11-25T10:00:00Z", "2026-11-25T10:01:30Z", "2026-11-25T10:02:00Z");
        let mut counter = PodCounter::default();
        let failed = pod("failed", t0, json!({"phase": "Failed"}));
        let mut leaving = pod("leaving", t0, ready("True", t0));
        leaving.metadata.deletion_timestamp = pod("x", t1, json!({})).metadata.creation_timestamp;
        let before = [pod("old", t0, ready("True", t0)), pod("new", t0, ready("False", t0)), failed, leaving];
        let counts = counter.count(3, &before, at(t1));
        assert_eq!((counts.ready, counts.draining, counts.started_in.len()), (1, 1, 0));
        assert_eq!(counts.starting_for, [90.0, 0.0], "the second has no pod yet");
        let after = [pod("old", t0, ready("False", t1)), pod("new", t0, ready("True", t1))];
        let counts = counter.count(2, &after, at(t2));
        assert_eq!((counts.ready, counts.started_in.as_slice()), (1, [90.0].as_slice()));
        assert_eq!(counts.starting_for, [30.0], "since it was last ready");
        assert_eq!(counter.count(2, &after, at(t2)).started_in, [0.0; 0]);
    }

    #[test]
    fn a_pod_says_why_it_does_not_start() {
        let unschedulable = json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}]});
        let no_image = json!({"containerStatuses": [{"name": "engine", "image": "x", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}}]});
        let creating = json!({"containerStatuses": [{"name": "engine", "image": "x", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"waiting": {"reason": "ContainerCreating"}}}]});
        let told =
            |status: Value| reason(&pod("p", "2026-11-25T10:00:00Z", status).status.expect("a status"));
        let text = told(unschedulable).expect("a reason");
        assert!(text.starts_with("Unschedulable: 0/3 nodes"), "{text}");
        assert_eq!(told(no_image).as_deref(), Some("ImagePullBackOff: Back-off"));
        assert_eq!(told(creating), None);
    }
}
