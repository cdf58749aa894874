//! Random pod histories with faults of the API server, drawn from a seed: at the end the roster equals the
//! server's state. Time is simulated, and no socket is used.
//!
//! `KVASIR_SEEDS=10000 cargo test --release -p control-kubernetes --test histories -- --nocapture` runs more of them.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use control_discovery::{Endpoint, RemovalLimit, Roster, channel, follow};
use control_kubernetes::{PodRules, PodSource, PodSourceConfig, Selection, object};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use serde_json::{Value, json};
use tests_apiserver::{ApiServer, Faults};

const NAMESPACE: &str = "llm";

/// A small generator (xorshift64*): equal seeds, equal histories.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % limit
    }
}

/// Creates a pod with one of few names and addresses, so that both are reused often.
fn pod(random: &mut Random, uid: u64) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": NAMESPACE, "name": format!("pod-{}", random.below(8)), "uid": format!("uid-{uid}"),
            "labels": {"app": if random.below(10) == 0 { "other" } else { "vllm" }}},
        "status": {"phase": "Running", "podIP": format!("10.0.0.{}", random.below(8)),
            "conditions": [{"type": "Ready", "status": if random.below(4) == 0 { "False" } else { "True" }}]},
    });
    match random.below(8) {
        0 => pod["metadata"]["deletionTimestamp"] = json!("2026-11-24T10:00:00Z"),
        1 => {
            pod["metadata"]["labels"]["llm-d.ai/role"] =
                json!(["prefill", "decode"][random.below(2) as usize])
        }
        2 => pod["status"]["podIP"] = Value::Null,
        _ => {}
    }
    pod
}

/// Returns the endpoints of the pods that the server holds: one for each address, of several the one in the
/// best state.
fn truth(server: &ApiServer) -> BTreeMap<String, Vec<Endpoint>> {
    let rules = PodRules { role: None, ports: vec![8000] };
    let mut all: BTreeMap<String, Vec<Endpoint>> = BTreeMap::new();
    server.change(|store| {
        for pod in store.list("pods", NAMESPACE).filter(|pod| pod["metadata"]["labels"]["app"] == "vllm") {
            let pod: Pod = serde_json::from_value(pod.clone()).expect("a pod");
            for endpoint in object(&pod, &rules).endpoints {
                all.entry(endpoint.url.clone()).or_default().push(endpoint);
            }
        }
    });
    for candidates in all.values_mut() {
        let best = candidates.iter().map(|endpoint| endpoint.state).min();
        candidates.retain(|endpoint| Some(endpoint.state) == best);
    }
    all
}

/// A roster that compares names only, as in a discovery that kept a restarted pod's old transport
/// (ai-dynamo/dynamo#12566). The histories must detect it.
#[derive(Default)]
struct KeyOnly(BTreeMap<String, Endpoint>);

impl KeyOnly {
    fn take(&mut self, endpoints: &[Endpoint]) {
        self.0.retain(|url, _| endpoints.iter().any(|endpoint| endpoint.url == *url));
        for endpoint in endpoints {
            self.0.entry(endpoint.url.clone()).or_insert_with(|| endpoint.clone());
        }
    }
}

fn is_truth<'a>(found: impl Iterator<Item = &'a Endpoint>, truth: &BTreeMap<String, Vec<Endpoint>>) -> bool {
    let found: Vec<&Endpoint> = found.collect();
    found.len() == truth.len()
        && found.iter().all(|endpoint| truth.get(&endpoint.url).is_some_and(|all| all.contains(endpoint)))
}

/// Runs one history; returns whether the roster that compares names only would have been wrong at its end.
async fn history(seed: u64) -> bool {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let server = ApiServer::new(seed);
    let client = Client::new(server.router(), NAMESPACE);
    let config = PodSourceConfig {
        namespace: None,
        selection: Selection::Labels("app=vllm".to_owned()),
        role: None,
        port: 8000,
        relist: Duration::from_secs(5 + random.below(295)),
    };
    let source = PodSource::new(client, config);
    let (mut senders, receiver) = channel(1);
    let guard = RemovalLimit { share: 0.5, time: Duration::from_secs(60) };
    let published: Arc<Mutex<(Vec<Endpoint>, KeyOnly)>> = Arc::default();
    let into = Arc::clone(&published);
    let following = tokio::spawn(follow(Roster::new(vec![source.name()], guard), receiver, move |batch| {
        if let Some(endpoints) = batch.endpoints {
            let (last, key_only) = &mut *into.lock().expect("lock");
            key_only.take(&endpoints);
            *last = endpoints;
        }
    }));
    let watching = tokio::spawn(source.watch(senders.remove(0)));
    server.set_faults(Faults::all());
    if random.below(2) == 0 {
        // So few changes are kept that a watch which was interrupted for a moment is too late.
        server.change(|store| store.keep_changes(3));
    }
    for uid in 0..40 + random.below(60) {
        match random.below(20) {
            0 => server.cut_watches(),
            1 => {
                server.set_down(true);
                tokio::time::sleep(Duration::from_millis(random.below(20_000))).await;
                server.set_down(false);
            }
            2..=5 => {
                let name = format!("pod-{}", random.below(8));
                server.change(|store| store.delete("pods", NAMESPACE, &name));
            }
            6 => server.change(|store| {
                if random.below(4) == 0 {
                    store.clear_without_events();
                }
            }),
            _ => {
                let pod = pod(&mut random, uid);
                server.change(|store| store.put("pods", pod));
            }
        }
        if random.below(3) > 0 {
            tokio::time::sleep(Duration::from_millis(random.below(3_000))).await;
        }
    }
    server.set_faults(Faults::default());
    // Longer than the longest pause after failures, a watch, and the guard's time; shorter than the relist
    // interval.
    tokio::time::sleep(Duration::from_secs(200)).await;
    let truth = truth(&server);
    let (found, key_only) = &*published.lock().expect("lock");
    assert!(is_truth(found.iter(), &truth), "seed {seed}: {found:#?}\nbut the server holds {truth:#?}");
    watching.abort();
    following.abort();
    !is_truth(key_only.0.values(), &truth)
}

#[test]
fn the_roster_is_what_the_server_holds_in_the_end() {
    let seeds = std::env::var("KVASIR_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(200_u64);
    let began = std::time::Instant::now();
    let (mut simulated, mut found_out) = (Duration::ZERO, 0);
    for seed in 0..seeds {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        let runtime = runtime.expect("a runtime");
        found_out += u64::from(runtime.block_on(async {
            let began = tokio::time::Instant::now();
            let is_found_out = history(seed).await;
            simulated += began.elapsed();
            is_found_out
        }));
    }
    println!(
        "{seeds} histories, {:.1} simulated hours in {:.1} s: the roster is the truth at each end; a roster that compares \
         names only is wrong in {found_out}",
        simulated.as_secs_f64() / 3600.0,
        began.elapsed().as_secs_f64()
    );
    assert!(found_out > seeds / 4, "the planted mistake is found out in {found_out} of {seeds}");
}
