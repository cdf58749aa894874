//! Several limits at once.

use super::*;

fn limiter(requests: Option<u64>, tokens: Option<u64>, concurrent: Option<u32>) -> Arc<Limiter> {
    Arc::new(Limiter::new(LimitConfig {
        requests_per_minute: requests,
        tokens_per_minute: tokens,
        concurrent_max: concurrent,
    }))
}

fn remaining(limiter: &Arc<Limiter>, now: u64) -> (Option<u64>, Option<u64>) {
    let state = RateState::of(Some(limiter), None, now);
    (state.requests.map(|limit| limit.remaining), state.tokens.map(|limit| limit.remaining))
}

#[test]
fn the_limit_that_refuses_is_named_and_nothing_is_taken() {
    let cases = [
        (limiter(Some(1), None, None), LimitKind::Requests, Some(Duration::from_secs(60))),
        (limiter(None, Some(100), None), LimitKind::Tokens, Some(Duration::from_secs(12))),
        (limiter(None, None, Some(1)), LimitKind::Concurrency, Some(CONCURRENCY_RETRY)),
    ];
    for (tight, kind, retry_after) in cases {
        for scope in [Scope::Key, Scope::Tenant] {
            tight.set(tight.config());
            let tight = Arc::new(Limiter::new(tight.config()));
            let wide = limiter(Some(100), Some(1000), Some(10));
            let (key, tenant) = if scope == Scope::Key { (&tight, &wide) } else { (&wide, &tight) };
            let first = admit(Some(key), Some(tenant), 60, 0).expect("within limits");
            assert_eq!(remaining(&wide, 0), (Some(99), Some(940)));
            let refused = admit(Some(key), Some(tenant), 60, 0).expect_err("over it");
            assert_eq!(refused, Refused { scope, kind, retry_after });
            assert_eq!(remaining(&wide, 0), (Some(99), Some(940)), "{kind:?} of {scope:?}");
            assert_eq!((key.running(), tenant.running()), (1, 1));
            drop(first);
            assert_eq!((key.running(), tenant.running()), (0, 0));
        }
    }
}

#[test]
fn a_limiter_that_refuses_tokens_keeps_no_request() {
    let key = limiter(Some(10), Some(100), None);
    let _charge = admit(Some(&key), None, 100, 0).expect("fits");
    assert!(admit(Some(&key), None, 1, 0).is_err());
    assert_eq!((remaining(&key, 0), key.running()), ((Some(9), Some(0)), 1));
}

#[test]
fn a_request_larger_than_the_limit_is_refused_for_good() {
    let key = limiter(None, Some(100), None);
    let refused = admit(Some(&key), None, 101, 0).expect_err("never fits");
    assert_eq!(refused, Refused { scope: Scope::Key, kind: LimitKind::Tokens, retry_after: None });
}

#[test]
fn usage_is_set_right() {
    let key = limiter(Some(10), Some(600), None);
    let mut charge = admit(Some(&key), None, 300, 0).expect("fits");
    charge.reconcile(100, 0);
    assert_eq!(remaining(&key, 0), (Some(9), Some(500)), "too much is given back");
    charge.reconcile(160, 0);
    assert_eq!((remaining(&key, 0), charge.tokens()), ((Some(9), Some(440)), 160), "and taken as it grows");
    charge.reconcile(1000, 0);
    assert_eq!(remaining(&key, 0), (Some(9), Some(0)), "into debt");
    let refused = admit(Some(&key), None, 100, 0).expect_err("in debt");
    assert_eq!(refused.retry_after, Some(Duration::from_secs(50)), "400 of debt and 100, at 10 a second");
    assert!(admit(Some(&key), None, 100, 50_000_000_000).is_ok());
    drop(charge);
}

#[test]
fn cancelling_gives_everything_back_and_dropping_only_the_place() {
    let key = limiter(Some(10), Some(600), Some(1));
    admit(Some(&key), None, 300, 0).expect("fits").cancel();
    assert_eq!((remaining(&key, 0), key.running()), ((Some(10), Some(600)), 0));
    drop(admit(Some(&key), None, 300, 0).expect("fits"));
    assert_eq!((remaining(&key, 0), key.running()), ((Some(9), Some(300)), 0));
    let mut charge = admit(Some(&key), None, 100, 0).expect("fits");
    charge.reconcile(0, 0);
    charge.reconcile(50, 0);
    charge.cancel();
    assert_eq!(remaining(&key, 0), (Some(9), Some(300)), "as it was before it");
}

#[test]
fn threads_never_exceed_the_concurrency() {
    let key = limiter(None, None, Some(3));
    let highest = AtomicU32::new(0);
    let inside = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20_000 {
                    if let Ok(charge) = admit(Some(&key), None, 1, 0) {
                        highest.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::hint::spin_loop();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        drop(charge);
                    }
                }
            });
        }
    });
    assert!((1..=3).contains(&highest.load(Ordering::SeqCst)));
    assert_eq!(key.running(), 0);
}

#[test]
fn estimates() {
    let cases = [
        (Estimate::PromptAndAnswer, 10, Some(5), 1, 15),
        (Estimate::PromptAndAnswer, 10, Some(5), 3, 25),
        (Estimate::PromptAndAnswer, 10, None, 0, 110),
        (Estimate::PromptAndAnswer, 10, Some(u64::MAX), 2, u64::MAX),
        (Estimate::Prompt, 10, Some(5), 3, 10),
    ];
    for (estimate, prompt, answer_max, choices, expected) in cases {
        assert_eq!(estimate.tokens(prompt, answer_max, 100, choices), expected);
    }
}
