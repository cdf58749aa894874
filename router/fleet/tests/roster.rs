//! The roster: the fleet follows its sources, errors change nothing, and workers with unchanged descriptions continue.

#![forbid(unsafe_code)]

use std::sync::Arc;

use router_engines::dialect::Role;
use router_fleet::testing::config;
use router_fleet::{AddedWorker, DEFAULT_POOL, Fleet, FleetSpec, RosterDelta, SpecError, WorkerSpec};
use router_policy::Policy;

fn specs(urls: &[&str]) -> Vec<WorkerSpec> {
    urls.iter().map(|url| WorkerSpec::new(url)).collect()
}

fn added(url: &str, uid: Option<&str>) -> AddedWorker {
    AddedWorker {
        url: url.to_owned(),
        role: String::new(),
        pool: DEFAULT_POOL.to_owned(),
        uid: uid.map(str::to_owned),
    }
}

fn names(fleet: &Fleet) -> Vec<String> {
    fleet.workers().keys().cloned().collect()
}

#[tokio::test]
async fn workers_that_are_described_alike_go_on_and_others_are_new() {
    let fleet = Fleet::start(config(Policy::default()), 1);
    let applied = fleet.configure(specs(&["http://a:1", "http://b:1"])).expect("a roster");
    assert_eq!(applied, RosterDelta { added: 2, ..RosterDelta::default() });
    let before = fleet.workers().get("a:1").cloned().expect("a");
    let version = fleet.spec().version;
    assert_eq!(fleet.configure(specs(&["http://A:1/", "http://b:1"])).map(|_| ()), Ok(()));
    assert_eq!(fleet.configure(fleet.configured().to_vec()), Ok(RosterDelta::default()));
    assert_eq!(fleet.spec().version, version + 1, "an equal roster is no change");
    let before = fleet.workers().get("a:1").cloned().unwrap_or(before);
    // A change to drain does not change the description.
    assert_eq!(fleet.drain("a:1"), Ok(RosterDelta { drained: 1, ..RosterDelta::default() }));
    assert!(Arc::ptr_eq(&before, &fleet.workers()["a:1"]) && before.is_draining());
    // The change to drain outlives changes of the configuration.
    fleet.configure(specs(&["http://A:1/", "http://c:1"])).expect("a roster");
    assert!(Arc::ptr_eq(&before, &fleet.workers()["a:1"]) && before.is_draining());
    assert_eq!(names(&fleet), ["a:1", "c:1"]);
    assert_eq!(fleet.serve_again("http://A:1"), Ok(RosterDelta { drained: 1, ..RosterDelta::default() }));
    // Another identity, or another role, is another worker.
    for uid in ["one", "two"] {
        let applied = fleet.add(added("http://a:1", Some(uid)), None);
        assert_eq!(applied, Ok(RosterDelta { replaced: 1, ..RosterDelta::default() }), "{uid}");
    }
    assert!(!Arc::ptr_eq(&before, &fleet.workers()["a:1"]));
    let prefill = WorkerSpec { role: Some(Role::Prefill), ..WorkerSpec::new("http://c:1") };
    let applied = fleet.configure(vec![prefill]).expect("a roster");
    assert_eq!((applied.replaced, applied.removed), (1, 0), "a was added by an administrator, too");
    assert_eq!(fleet.remove("a:1"), Ok(RosterDelta { removed: 1, ..RosterDelta::default() }));
    assert_eq!(names(&fleet), ["c:1"]);
}

#[tokio::test]
async fn a_roster_that_cannot_be_changes_nothing() {
    let fleet = Fleet::start(config(Policy::default()), 1);
    fleet.configure(specs(&["http://a:1"])).expect("a roster");
    fleet.drain("a:1").expect("it is there");
    let before = (fleet.spec(), fleet.configured());
    let elsewhere = WorkerSpec { pool: "none".to_owned(), ..WorkerSpec::new("http://b:1") };
    for roster in
        [specs(&["http://b:1", "http://B:1"]), specs(&["b:1"]), specs(&["https://b:1"]), vec![elsewhere]]
    {
        fleet.configure(roster).expect_err("no roster");
    }
    assert_eq!(fleet.drain("b:1"), Err(SpecError::UnknownWorker("b:1".to_owned())));
    assert_eq!(fleet.add(added("https://b:1", None), None), Err(SpecError::Tls("https://b:1".to_owned())));
    let stale = FleetSpec { version: before.0.version, workers: Vec::new() };
    assert!(matches!(fleet.apply(stale), Err(SpecError::Stale { .. })));
    assert_eq!((fleet.spec(), fleet.configured()), before);
    // A full state replaces the states of all sources.
    let full = FleetSpec { version: before.0.version + 7, workers: specs(&["http://z:1", "http://a:1"]) };
    let applied = fleet.apply(full).expect("it is newer");
    assert_eq!((applied.added, applied.drained), (1, 1));
    assert_eq!(names(&fleet), ["a:1", "z:1"]);
}

fn pod(url: &str, uid: &str) -> WorkerSpec {
    WorkerSpec { uid: Some(uid.to_owned()), ..WorkerSpec::new(url) }
}

#[tokio::test]
async fn discovered_workers_stand_beside_configured_ones_and_one_mistake_does_not_stop_the_rest() {
    let fleet = Fleet::start(config(Policy::default()), 1);
    fleet.configure(specs(&["http://a:1"])).expect("a roster");
    let configured = fleet.workers().get("a:1").cloned().expect("a");
    let elsewhere = WorkerSpec { pool: "none".to_owned(), ..WorkerSpec::new("http://c:1") };
    let found = vec![
        pod("http://A:1", "1"),
        pod("http://b:1", "1"),
        elsewhere,
        WorkerSpec::new("https://d:1"),
        WorkerSpec::new("e:1"),
        pod("http://f:1", &"u".repeat(65)),
        pod("http://B:1/", "2"),
    ];
    let discovered = fleet.discover(found).expect("some can be");
    assert_eq!(discovered.applied, RosterDelta { added: 1, ..RosterDelta::default() });
    assert_eq!(discovered.refused.len(), 5, "{:?}", discovered.refused);
    assert_eq!(names(&fleet), ["a:1", "b:1"]);
    assert!(Arc::ptr_eq(&configured, &fleet.workers()["a:1"]), "the configuration says more of it");
    // A worker that the configuration no longer names is described by its discovery source.
    let applied = fleet.configure(Vec::new()).expect("a roster");
    assert_eq!(applied, RosterDelta { replaced: 1, ..RosterDelta::default() });
    assert_eq!(fleet.workers()["a:1"].spec.uid.as_deref(), Some("1"));
    let all =
        (0..router_fleet::WORKERS_MAX + 5).map(|port| WorkerSpec::new(&format!("http://w:{}", port + 1)));
    let discovered = fleet.discover(all.collect()).expect("as many as can be");
    assert_eq!(discovered.refused, [SpecError::TooMany(router_fleet::WORKERS_MAX + 5)]);
    assert_eq!(fleet.workers().len(), router_fleet::WORKERS_MAX);
    // Later discovered workers take no place from present ones, and give way to the configuration.
    let more = (0..9).map(|number| WorkerSpec::new(&format!("http://a{number}:1")));
    let all = (0..router_fleet::WORKERS_MAX).map(|port| WorkerSpec::new(&format!("http://w:{}", port + 1)));
    let discovered = fleet.discover(more.chain(all).collect()).expect("as many as can be");
    assert_eq!((discovered.applied, discovered.refused.len()), (RosterDelta::default(), 1));
    let applied = fleet.configure(specs(&["http://configured:1"])).expect("it has a place");
    assert_eq!((applied.added, applied.removed), (1, 1));
    fleet.configure(Vec::new()).expect("none");
    assert_eq!(fleet.discover(Vec::new()).expect("none").applied.removed, router_fleet::WORKERS_MAX);
}

#[tokio::test]
async fn a_pod_that_takes_the_address_of_another_one_inherits_nothing() {
    let fleet = Fleet::start(config(Policy::default()), 1);
    fleet.discover(vec![pod("http://a:1", "1")]).expect("a worker");
    let first = fleet.workers().get("a:1").cloned().expect("a");
    fleet.drain("a:1").expect("it is there");
    let draining = WorkerSpec { is_draining: true, ..pod("http://a:1", "1") };
    assert_eq!(fleet.discover(vec![draining]).expect("a worker").applied, RosterDelta::default());
    assert!(Arc::ptr_eq(&first, &fleet.workers()["a:1"]) && first.is_draining());
    let replaced = fleet.discover(vec![pod("http://a:1", "2")]).expect("a worker");
    assert_eq!(replaced.applied, RosterDelta { replaced: 1, ..RosterDelta::default() });
    let second = fleet.workers().get("a:1").cloned().expect("a");
    assert!(!Arc::ptr_eq(&first, &second) && !second.is_draining());
    // Nor does an administrator's description of the address make one pod of two.
    fleet.add(added("http://a:1", None), None).expect("a worker");
    let described = fleet.workers().get("a:1").cloned().expect("a");
    assert_eq!(described.spec.uid.as_deref(), Some("2"));
    fleet.drain("a:1").expect("it is there");
    fleet.discover(vec![pod("http://a:1", "3")]).expect("a worker");
    assert!(!fleet.workers()["a:1"].is_draining());
}
