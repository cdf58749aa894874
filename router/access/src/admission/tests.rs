//! Tests of the gate by its public interface, against an oracle, and under load.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use super::*;
use crate::limits::testing::Random;

const SECOND: u64 = 1_000_000_000;

fn gate(running_max: u32, waiting_max: usize) -> Arc<Gate> {
    let wait_max = Duration::from_secs(3600);
    Gate::new(GateConfig { running_max, waiting_max, tenant_waiting_max: waiting_max, wait_max })
        .expect("good")
}

fn ask(tenant: &Arc<str>) -> AdmissionRequest<'_> {
    AdmissionRequest { tenant, priority: 0, weight: 1, cost: 100, deadline: u64::MAX }
}

fn admitted(entry: Entry) -> Permit {
    match entry {
        Entry::Admitted(permit) => permit,
        other => panic!("{other:?}"),
    }
}

fn waiting(entry: Entry) -> Wait {
    match entry {
        Entry::Waiting(wait) => wait,
        other => panic!("{other:?}"),
    }
}

fn refused(entry: Entry) -> Refusal {
    match entry {
        Entry::Full(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

fn counts(gate: &Gate) -> (u32, u32) {
    (gate.stats().running, gate.stats().waiting)
}

#[test]
fn a_place_goes_to_the_next_and_a_full_queue_refuses() {
    let (gate, tenant) = (gate(1, 1), "a".into());
    let first = admitted(gate.enter(&ask(&tenant), 0));
    let mut second = waiting(gate.enter(&ask(&tenant), 0));
    let refusal = refused(gate.enter(&ask(&tenant), 0));
    assert_eq!(refusal, Refusal { retry_after: Duration::from_secs(1), is_queue_full: true });
    assert!(second.try_take().is_none());
    drop(first);
    assert!(matches!(second.try_take(), Some(WaitOutcome::Admitted(_))), "and it leaves at once");
    assert_eq!(counts(&gate), (0, 0));
    assert!(Gate::new(GateConfig { running_max: 0, ..GateConfig::default() }).is_err());
}

#[test]
fn better_priorities_go_first() {
    let (gate, tenant) = (gate(1, 9), "a".into());
    let inside = admitted(gate.enter(&ask(&tenant), 0));
    let mut late = waiting(gate.enter(&AdmissionRequest { priority: 1, ..ask(&tenant) }, 0));
    let mut early = waiting(gate.enter(&AdmissionRequest { priority: -1, ..ask(&tenant) }, 0));
    drop(inside);
    assert!(late.try_take().is_none());
    assert!(early.try_take().is_some() && late.try_take().is_some());
}

#[test]
fn requests_without_cost_starve_nobody() {
    let (gate, tenants) = (gate(1, 999), ["free", "paying"].map(Arc::from));
    let mut inside = admitted(gate.enter(&ask(&tenants[0]), 0));
    let mut paying = [(); 2].map(|()| waiting(gate.enter(&ask(&tenants[1]), 0)));
    let mut free: VecDeque<Wait> = VecDeque::new();
    let (mut served, mut rounds) = (0, 0);
    while served < 2 {
        free.push_back(waiting(gate.enter(&AdmissionRequest { cost: 0, ..ask(&tenants[0]) }, 0)));
        drop(inside);
        let outcome = paying.iter_mut().find_map(Wait::try_take);
        served += usize::from(outcome.is_some());
        let outcome = outcome.or_else(|| free.pop_front()?.try_take());
        let Some(WaitOutcome::Admitted(permit)) = outcome else { panic!("somebody is next") };
        inside = permit;
        rounds += 1;
        assert!(rounds < 200, "100 tokens are 100 free requests");
    }
    drop(inside);
}

#[test]
fn who_gives_up_or_is_late_holds_nothing() {
    let (gate, tenant) = (gate(1, 9), "a".into());
    let inside = admitted(gate.enter(&ask(&tenant), 0));
    let given_up = waiting(gate.enter(&ask(&tenant), 0));
    let mut late = waiting(gate.enter(&AdmissionRequest { deadline: 5, ..ask(&tenant) }, 0));
    let chosen = waiting(gate.enter(&ask(&tenant), 0));
    drop(given_up);
    assert_eq!(counts(&gate), (1, 2));
    gate.expire(4);
    assert!(late.try_take().is_none());
    gate.expire(5);
    assert!(matches!(late.try_take(), Some(WaitOutcome::Expired)));
    drop(inside);
    assert_eq!(counts(&gate), (1, 0), "the permit lies in the channel");
    drop(chosen);
    assert_eq!(counts(&gate), (0, 0));
    let stats = gate.stats();
    assert_eq!((stats.expired, stats.abandoned, stats.admitted_from_queue), (1, 1, 1));
    assert!(!refused(gate_full_at(&gate, &tenant, 5)).is_queue_full, "its deadline is now");
}

fn gate_full_at(gate: &Arc<Gate>, tenant: &Arc<str>, now: u64) -> Entry {
    let _inside = gate.enter(&ask(tenant), now);
    gate.enter(&AdmissionRequest { deadline: now, ..ask(tenant) }, now)
}

#[test]
fn it_sheds_what_would_wait_too_long() {
    let tenant: Arc<str> = "a".into();
    let config = GateConfig { wait_max: Duration::from_secs(10), ..GateConfig::default() };
    let gate = Gate::new(GateConfig { running_max: 2, ..config }).expect("good");
    // Two places of 100 tokens a second each.
    admitted(gate.enter(&ask(&tenant), 0)).release(SECOND);
    assert_eq!(gate.stats().tokens_per_second, 200.0);
    let _inside = [(); 2].map(|()| admitted(gate.enter(&ask(&tenant), SECOND)));
    let big = AdmissionRequest { cost: 1000, ..ask(&tenant) };
    let _waits = [(); 2].map(|()| waiting(gate.enter(&big, SECOND)));
    let hurried = AdmissionRequest { deadline: 10 * SECOND, ..ask(&tenant) };
    let refusal = Refusal { retry_after: Duration::from_secs(10), is_queue_full: false };
    assert_eq!(refused(gate.enter(&hurried, SECOND)), refusal, "2000 tokens are ahead");
    let _third = waiting(gate.enter(&big, SECOND));
    let refusal = refused(gate.enter(&ask(&tenant), SECOND));
    assert_eq!(refusal.retry_after, Duration::from_secs(15), "more than wait_max");
    let other: Arc<str> = "b".into();
    let light = waiting(gate.enter(&ask(&other), SECOND));
    assert_eq!(gate.stats().refused_wait_too_long, 2);
    drop(light);
}

#[test]
fn the_number_inside_can_change() {
    let (gate, tenant) = (gate(1, 9), "a".into());
    let mut inside = vec![admitted(gate.enter(&ask(&tenant), 0))];
    let mut waits: Vec<Wait> = (0..4).map(|_| waiting(gate.enter(&ask(&tenant), 0))).collect();
    gate.set_running_max(3);
    for wait in &mut waits[..2] {
        let Some(WaitOutcome::Admitted(permit)) = wait.try_take() else { panic!("a place was made") };
        inside.push(permit);
    }
    assert_eq!(counts(&gate), (3, 2));
    gate.set_running_max(2);
    drop(inside.pop());
    assert_eq!(counts(&gate), (2, 2), "one too many left");
    drop(inside.pop());
    assert_eq!(counts(&gate), (2, 1), "a place was handed over");
    drop(waits);
    drop(inside);
    assert_eq!(counts(&gate), (0, 0));
}

#[test]
fn a_queue_of_those_who_gave_up_is_no_deep_recursion() {
    let (gate, tenant) = (gate(1, 100_000), "a".into());
    let inside = admitted(gate.enter(&ask(&tenant), 0));
    let waits: Vec<Wait> = (0..100_000).map(|_| waiting(gate.enter(&ask(&tenant), 0))).collect();
    drop(inside);
    drop(waits);
    assert_eq!(counts(&gate), (0, 0));
}

/// Against the simplest possible gate: one tenant, one priority, so that the order is that of arrival.
#[test]
fn it_does_what_the_oracle_does() {
    for seed in 0..50 {
        let mut random = Random(seed);
        let (running_max, waiting_max) = (1 + random.below(4) as usize, random.below(6) as usize);
        let (gate, tenant) = (gate(running_max as u32, waiting_max), "a".into());
        let mut permits: Vec<Permit> = Vec::new();
        let mut waits: VecDeque<(u64, Wait)> = VecDeque::new();
        for now in 1..2000 {
            match random.below(6) {
                0..3 => {
                    let deadline = now + 1 + random.below(40);
                    let entry = gate.enter(&AdmissionRequest { deadline, ..ask(&tenant) }, now);
                    // Entering without waiters and with a free place does not expire waiters.
                    waits.retain_mut(|(_, wait)| !matches!(wait.try_take(), Some(WaitOutcome::Expired)));
                    match entry {
                        Entry::Admitted(permit) => {
                            assert!(permits.len() < running_max && waits.is_empty(), "seed {seed}");
                            permits.push(permit);
                        }
                        Entry::Waiting(wait) => {
                            assert!(permits.len() == running_max && waits.len() < waiting_max, "seed {seed}");
                            waits.push_back((deadline, wait));
                        }
                        Entry::Full(refusal) => {
                            assert!(permits.len() == running_max, "seed {seed}");
                            assert_eq!(refusal.is_queue_full, waits.len() >= waiting_max, "seed {seed}");
                        }
                    }
                }
                3 if !permits.is_empty() => {
                    let permit = permits.swap_remove(random.below(permits.len() as u64) as usize);
                    // Released at time 0, so that the speed stays unknown and no request is shed for its
                    // wait.
                    permit.release(0);
                    if let Some((_, mut first)) = waits.pop_front() {
                        let Some(WaitOutcome::Admitted(permit)) = first.try_take() else {
                            panic!("seed {seed}: the first was not next")
                        };
                        permits.push(permit);
                    }
                }
                4 if !waits.is_empty() => {
                    waits.remove(random.below(waits.len() as u64) as usize);
                }
                _ => {
                    gate.expire(now);
                    waits.retain_mut(|(deadline, wait)| match wait.try_take() {
                        Some(WaitOutcome::Expired) => {
                            assert!(*deadline <= now, "seed {seed}");
                            false
                        }
                        None => *deadline > now,
                        Some(outcome) => panic!("seed {seed}: {outcome:?}"),
                    });
                }
            }
            assert_eq!(counts(&gate), (permits.len() as u32, waits.len() as u32), "seed {seed}, time {now}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_tasks_never_exceed_it_and_nobody_is_lost() {
    const RUNNING_MAX: usize = 5;
    let gate = gate(RUNNING_MAX as u32, 10_000);
    let inside = Arc::new(AtomicUsize::new(0));
    let clock = Arc::new(AtomicU64::new(1));
    let mut tasks = Vec::new();
    for task in 0..200_u64 {
        let (gate, inside, clock) = (Arc::clone(&gate), Arc::clone(&inside), Arc::clone(&clock));
        tasks.push(tokio::spawn(async move {
            let mut random = Random(task);
            let tenant: Arc<str> = (task % 7).to_string().into();
            let (mut served, mut expired) = (0_u64, 0_u64);
            for _ in 0..200 {
                let now = clock.fetch_add(1, Ordering::Relaxed);
                let deadline = if random.below(10) == 0 { now + random.below(50) + 1 } else { u64::MAX };
                let priority = random.below(2) as i32;
                let ask = AdmissionRequest {
                    tenant: &tenant,
                    priority,
                    weight: 1 + task as u32 % 3,
                    cost: random.below(99),
                    deadline,
                };
                let admit = gate.admit(&ask, now);
                let outcome = if random.below(4) == 0 {
                    // The future is dropped after a random time.
                    let patience = Duration::from_micros(random.below(300));
                    match tokio::time::timeout(patience, admit).await {
                        Ok(outcome) => outcome,
                        Err(_) => continue,
                    }
                } else {
                    admit.await
                };
                match outcome {
                    Ok(WaitOutcome::Admitted(permit)) => {
                        assert!(inside.fetch_add(1, Ordering::SeqCst) < RUNNING_MAX);
                        if random.below(3) == 0 {
                            tokio::task::yield_now().await;
                        }
                        inside.fetch_sub(1, Ordering::SeqCst);
                        served += 1;
                        if random.below(2) == 0 { drop(permit) } else { permit.release(now) }
                    }
                    Ok(WaitOutcome::Expired) => expired += 1,
                    Err(refusal) => assert!(!refusal.is_queue_full),
                }
            }
            (served, expired)
        }));
    }
    let mut total = (0, 0);
    for task in tasks {
        // A waiter that is lost would wait forever; the timeout makes that a failure.
        let (served, expired) = tokio::time::timeout(Duration::from_secs(120), task)
            .await
            .expect("nobody is lost")
            .expect("no panic");
        total = (total.0 + served, total.1 + expired);
    }
    let stats = gate.stats();
    assert_eq!((stats.running, stats.waiting, stats.waiting_tokens), (0, 0, 0));
    assert!(total.0 > 20_000 && stats.admitted_from_queue > 0, "{stats:?}");
    assert!(stats.admitted_at_once + stats.admitted_from_queue >= total.0 && stats.expired >= total.1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saturated_tenants_get_their_weights_and_none_starves() {
    const WEIGHTS: [u32; 3] = [1, 2, 4];
    let gate = gate(4, 1000);
    let tokens: Arc<[AtomicU64; 3]> = Arc::new([0; 3].map(AtomicU64::new));
    // No request is served before all wait; else the first task that is scheduled would have the gate to
    // itself.
    let start: Arc<str> = "start".into();
    let held = [(); 4].map(|()| admitted(gate.enter(&ask(&start), 0)));
    let mut tasks = Vec::new();
    for task in 0..60_usize {
        let (gate, tokens) = (Arc::clone(&gate), Arc::clone(&tokens));
        tasks.push(tokio::spawn(async move {
            let index = task % 3;
            let tenant: Arc<str> = index.to_string().into();
            let mut random = Random(task as u64);
            let mut served = 0;
            while tokens.iter().map(|tokens| tokens.load(Ordering::Relaxed)).sum::<u64>() < 2_000_000 {
                let cost = 1 + random.below(200);
                let ask = AdmissionRequest {
                    tenant: &tenant,
                    priority: 0,
                    weight: WEIGHTS[index],
                    cost,
                    deadline: u64::MAX,
                };
                let Ok(WaitOutcome::Admitted(permit)) = gate.admit(&ask, 0).await else { panic!("let in") };
                tokens[index].fetch_add(cost, Ordering::Relaxed);
                served += 1;
                tokio::task::yield_now().await;
                drop(permit);
            }
            served
        }));
    }
    while gate.stats().waiting < 60 {
        tokio::task::yield_now().await;
    }
    drop(held);
    let mut fewest = u64::MAX;
    for task in tasks {
        fewest = fewest.min(task.await.expect("no panic"));
    }
    let served: Vec<f64> = tokens.iter().map(|tokens| tokens.load(Ordering::Relaxed) as f64).collect();
    let total: f64 = served.iter().sum();
    for (index, weight) in WEIGHTS.into_iter().enumerate() {
        let share = f64::from(weight) / 7.0;
        assert!((served[index] / total / share - 1.0).abs() < 0.1, "{served:?}");
    }
    assert!(fewest > 50, "{fewest}");
}
