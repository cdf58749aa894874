//! A request with a known key that does not have to wait allocates nothing in this crate.

#![forbid(unsafe_code)]

use std::hint::black_box;
use std::sync::Arc;

use router_access::{
    AdmissionRequest, BodyPolicy, Credential, Entry, Gate, GateConfig, KeySet, KeyStore, LimitTable, Salter,
    Scope, admit, is_plain_request_id, new_key,
};
use tests_allocations::{Counting, count};

/// Rounds that are counted.
const ROUNDS: u64 = 100_000;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(mut work: impl FnMut(u64)) -> u64 {
    // A warm-up round, for lazily made values.
    work(0);
    count(|| (1..=ROUNDS).for_each(&mut work)).allocations
}

#[test]
fn an_admitted_request_allocates_nothing() {
    let key = new_key("app", "acme").expect("key");
    let limits = "requests_per_minute = 1000000000\ntokens_per_minute = 1000000000\nconcurrent_max = 9\n";
    let text = format!("{}{limits}[[tenant]]\nname = \"acme\"\n{limits}", key.lines);
    let keys = KeyStore::new(KeySet::parse(&text).expect("keys"));
    let header = format!("Bearer {}", key.secret);
    let table = LimitTable::default();
    let gate = Gate::new(GateConfig::default()).expect("gate");
    let salter = Salter::new(&[1; 32], true).expect("secret");
    let body = BodyPolicy::default();
    let count = allocations(|round| {
        let now = round * 1_000_000;
        let Credential::Key(presented) = Credential::from_headers(Some(&header), None) else {
            panic!("a key")
        };
        let keys = keys.load();
        let grant = keys.find(presented, 0).expect("known");
        assert!(grant.models.allows("small"));
        black_box((is_plain_request_id("chatcmpl-1"), body.field("cache_salt")));
        black_box(salter.salt(&grant.tenant, Some("own")));
        let of_key = table.get(grant.scope, &grant.name, grant.limits, now).expect("room");
        let of_tenant = table.get(Scope::Tenant, &grant.tenant, grant.tenant_limits, now).expect("room");
        let mut charge = admit(of_key.as_ref(), of_tenant.as_ref(), 1000, now).expect("within limits");
        let ask = AdmissionRequest {
            tenant: &grant.tenant,
            priority: grant.priority,
            weight: grant.weight,
            cost: 1000,
            deadline: u64::MAX,
        };
        let Entry::Admitted(permit) = gate.enter(&ask, now) else { panic!("nobody is inside") };
        charge.reconcile(900, now);
        permit.release(now + 1);
        drop(charge);
    });
    assert_eq!(count, 0);
    let planted = allocations(|round| drop(black_box(Arc::new(round))));
    assert_eq!(planted, ROUNDS, "what allocates is counted");
}
