//! `KvasirGraph` objects over a double of the API server.

use std::time::{Duration, Instant};

use control_deploy::custom_resource::{KINDS, definition};
use control_kubernetes::GraphController;
use kube::Client;
use serde_json::{Value, json};
use tests_apiserver::{ApiServer, Rule};

const NAMESPACE: &str = "llm";

fn graph(spec: Value, generation: u64) -> Value {
    json!({
        "apiVersion": "kvasir.dev/v1alpha1", "kind": "KvasirGraph",
        "metadata": {"name": "qwen", "namespace": NAMESPACE, "uid": "graph-1", "generation": generation},
        "spec": spec,
    })
}

fn spec() -> Value {
    json!({
        "model": "Qwen/Qwen3-8B", "engine": "vllm", "gateway": {"replicas": 2},
        "role": [{"role": "prefill", "workers": 2}, {"role": "decode", "max": 4}],
    })
}

struct Cluster {
    server: ApiServer,
    running: tokio::task::JoinHandle<()>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.running.abort();
    }
}

impl Cluster {
    async fn start() -> Self {
        let server = ApiServer::start(1).await.expect("a port");
        let config: kube::config::Kubeconfig =
            serde_json::from_str(&server.kubeconfig(NAMESPACE)).expect("a kubeconfig");
        let config =
            kube::Config::from_custom_kubeconfig(config, &Default::default()).await.expect("a configuration");
        let client = Client::try_from(config).expect("a client");
        // The default of 30 s is too long for a test.
        let graphs = GraphController::new(client, Some(NAMESPACE), "registry.example/kvasir:2");
        let running = tokio::spawn(graphs.again_every(Duration::from_millis(300)).run());
        Self { server, running }
    }

    fn get(&self, resource: &str, name: &str) -> Option<Value> {
        self.server.change(|store| store.get(resource, NAMESPACE, name).cloned())
    }

    fn put(&self, resource: &str, object: Value) {
        self.server.change(|store| drop(store.put(resource, object)));
    }

    /// Changes the spec as a user's `kubectl apply` does: the status stays.
    fn change(&self, spec: Value, generation: u64) {
        let mut object = graph(spec, generation);
        if let Some(known) = self.get("kvasirgraphs", "qwen") {
            object["status"] = known["status"].clone();
        }
        self.put("kvasirgraphs", object);
    }

    fn condition(&self, kind: &str) -> Value {
        let graph = self.get("kvasirgraphs", "qwen").unwrap_or_default();
        let all = graph["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|condition| condition["type"] == kind).unwrap_or_default()
    }

    async fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let until = Instant::now() + Duration::from_secs(50);
        while !done(self) {
            assert!(
                Instant::now() < until,
                "waited in vain for {what}: {:#}",
                self.get("kvasirgraphs", "qwen").unwrap_or_default()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test]
async fn a_graph_becomes_its_objects_and_its_status_says_how_it_is() {
    let cluster = Cluster::start().await;
    let began = Instant::now();
    cluster.change(spec(), 1);
    cluster.wait("the decode workers", |cluster| cluster.get("deployments", "qwen-decode").is_some()).await;
    cluster.wait("the status", |cluster| cluster.condition("Applied")["status"] == "True").await;
    println!("a graph is there {:.0} ms after it was made", began.elapsed().as_secs_f64() * 1e3);
    let prefill = cluster.get("deployments", "qwen-prefill").expect("it");
    assert_eq!(prefill["metadata"]["ownerReferences"][0]["uid"], "graph-1");
    assert_eq!(prefill["spec"]["replicas"], 2);
    let ready = cluster.condition("Ready");
    assert_eq!((&ready["status"], &ready["reason"]), (&json!("False"), &json!("PodsStart")), "{ready}");
    assert!(
        ready["message"].as_str().is_some_and(|text| text.contains("no decode worker is ready")),
        "{ready}"
    );
    // The planner has set a count, and workers have become ready.
    let mut generations = Vec::new();
    let gateway = cluster.get("statefulsets", "qwen-gateway").expect("it");
    assert_eq!(gateway["spec"]["template"]["spec"]["containers"][0]["image"], "registry.example/kvasir:2");
    let mut gateway = gateway;
    gateway["status"] = json!({"replicas": 2, "readyReplicas": 2});
    cluster.put("statefulsets", gateway);
    for (name, count) in [("qwen-prefill", 2), ("qwen-decode", 3)] {
        let mut object = cluster.get("deployments", name).expect("it");
        object["spec"]["replicas"] = json!(count);
        object["status"] = json!({"replicas": count, "readyReplicas": count});
        generations.push(object["spec"]["template"]["metadata"]["labels"]["kvasir/generation"].clone());
        cluster.put("deployments", object);
    }
    assert_eq!(generations[0], generations[1], "one generation");
    cluster.wait("it to be ready", |cluster| cluster.condition("Ready")["status"] == "True").await;
    // A new image changes the generation of both roles, and the planner's count stays.
    let mut other = spec();
    other["image"] = json!("vllm/vllm-openai:v0.33.0");
    cluster.change(other, 2);
    let generation = |cluster: &Cluster| {
        let decode = cluster.get("deployments", "qwen-decode").unwrap_or_default();
        decode["spec"]["template"]["metadata"]["labels"]["kvasir/generation"].clone()
    };
    cluster.wait("another generation", |cluster| generation(cluster) != generations[0]).await;
    assert_eq!(cluster.get("deployments", "qwen-decode").expect("it")["spec"]["replicas"], 3);
    cluster
        .wait("its status", |cluster| {
            cluster
                .get("kvasirgraphs", "qwen")
                .is_some_and(|graph| graph["status"]["observedGeneration"] == 2)
        })
        .await;
    let graph = cluster.get("kvasirgraphs", "qwen").expect("it");
    assert_eq!(graph["status"]["roles"][1], json!({"role": "decode", "workers": 3, "ready": 3}));
}

#[tokio::test]
async fn what_a_graph_has_no_more_is_removed_and_what_is_others_stays() {
    let cluster = Cluster::start().await;
    cluster.put("configmaps", json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "own", "namespace": NAMESPACE, "labels": {"app.kubernetes.io/instance": "qwen"}},
    }));
    cluster.change(spec(), 1);
    cluster.wait("the control service", |cluster| cluster.get("deployments", "qwen-control").is_some()).await;
    // One role instead of two, which is not scaled by a planner.
    let mut other = spec();
    other["role"] = json!([{"role": "both", "workers": 1}]);
    cluster.change(other, 2);
    cluster
        .wait("the old roles to go", |cluster| {
            ["qwen-prefill", "qwen-decode", "qwen-control"]
                .iter()
                .all(|name| cluster.get("deployments", name).is_none())
        })
        .await;
    assert!(cluster.get("deployments", "qwen-both").is_some() && cluster.get("configmaps", "own").is_some());
    assert!(cluster.get("roles", "qwen-control").is_none(), "nor its rights");
}

#[tokio::test]
async fn mistakes_and_refusals_are_in_the_status_and_nothing_is_undone() {
    let cluster = Cluster::start().await;
    cluster.change(spec(), 1);
    cluster.wait("the status", |cluster| cluster.condition("Applied")["status"] == "True").await;
    let mut wrong = spec();
    wrong["role"][1]["workers"] = json!(3);
    cluster.change(wrong, 2);
    cluster.wait("the mistake", |cluster| cluster.condition("Accepted")["status"] == "False").await;
    let said = cluster.condition("Accepted");
    assert!(
        said["message"].as_str().is_some_and(|text| text.contains("leave workers out, or max")),
        "{said}"
    );
    assert!(cluster.get("deployments", "qwen-decode").is_some(), "what was there stays");
    // Objects that another owner created are not taken over.
    let mut others = spec();
    others["role"] = json!([{"role": "both"}]);
    cluster.put("deployments", json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "qwen-both", "namespace": NAMESPACE},
        "spec": {"replicas": 7},
    }));
    cluster.change(others, 3);
    let says = |cluster: &Cluster, words: &str| {
        cluster.condition("Applied")["message"].as_str().is_some_and(|text| text.contains(words))
    };
    cluster.wait("the refusal", |cluster| says(cluster, "belongs to another owner")).await;
    assert_eq!(cluster.get("deployments", "qwen-both").expect("it")["spec"], json!({"replicas": 7}));
    // Missing rights are reported by name.
    let all = |text: &str| vec![text.to_owned()];
    let rules = ["kvasirgraphs", "kvasirgraphs/status", "configmaps"].map(|resource| Rule {
        groups: all("*"),
        resources: all(resource),
        verbs: all("*"),
        ..Rule::default()
    });
    cluster.server.allow(rules.into());
    cluster.change(spec(), 4);
    cluster
        .wait("the refusal", |cluster| {
            cluster.condition("Applied")["message"].as_str().is_some_and(|text| text.contains("forbidden"))
        })
        .await;
    let said = cluster.condition("Applied");
    assert!(said["message"].as_str().is_some_and(|text| text.contains("forbidden")), "{said}");
}

/// The operator's Role, as `kvasir deploy operator` prints it, is sufficient.
#[tokio::test]
async fn the_operators_rights_are_enough() {
    let text = control_deploy::custom_resource::operator("kvasir:1").expect("manifests");
    let documents: Vec<Value> =
        text.split("\n---\n").map(|text| serde_saphyr::from_str(text).expect("YAML")).collect();
    let role = documents.iter().find(|object| object["kind"] == "Role").expect("a Role");
    let list = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(|text| text.as_str().map(str::to_owned)).collect()
    };
    let rules = role["rules"].as_array().expect("rules").iter().map(|rule| Rule {
        groups: list(&rule["apiGroups"]),
        resources: list(&rule["resources"]),
        names: list(&rule["resourceNames"]),
        verbs: list(&rule["verbs"]),
    });
    let cluster = Cluster::start().await;
    cluster.server.allow(rules.collect());
    cluster.change(spec(), 1);
    cluster
        .wait("everything to be applied", |cluster| cluster.condition("Applied")["status"] == "True")
        .await;
    let mut other = spec();
    other["role"] = json!([{"role": "both"}]);
    cluster.change(other, 2);
    cluster.wait("the old roles to go", |cluster| cluster.get("deployments", "qwen-decode").is_none()).await;
    assert!(KINDS.len() > 10 && definition()["metadata"]["name"] == "kvasirgraphs.kvasir.dev");
}
