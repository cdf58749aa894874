//! Contract test of the API server's double: the same requests go to the double and to a real kube-apiserver,
//! and must get the same answers. It also runs parts of this crate against the real one.
//!
//! `KVASIR_APISERVER_KUBECONFIG` (an administrator) and `KVASIR_APISERVER_USER_KUBECONFIG` (the user `plain`,
//! without rights) select a real one; `tests/apiserver/real/run.sh` builds and starts one. Without it only
//! the double is queried, and its answers are compared with the recorded answers of the real one.

use std::time::{Duration, Instant};

use control_deploy::custom_resource::definition;
use control_discovery::{EndpointState, RemovalLimit, Roster, channel, follow};
use control_kubernetes::{
    GraphController, KubernetesLease, PodSource, PodSourceConfig, ScaleError, ScaleTarget, Selection,
    Workload,
};
use futures_util::TryStreamExt;
use kube::Client;
use kube::api::DynamicObject;
use kube::core::WatchEvent;
use serde_json::{Value, json};
use tests_apiserver::{ApiServer, Rule};
use tokio::sync::watch;

/// Answers of a kube-apiserver 1.20.2 to the requests of [`transcript`].
const EXPECTED: &str = include_str!("contract.txt");

async fn client(kubeconfig: &str, namespace: &str) -> Client {
    let text = std::fs::read_to_string(kubeconfig).expect("the kubeconfig");
    let config: kube::config::Kubeconfig = serde_json::from_str(&text).expect("a kubeconfig");
    let mut config =
        kube::Config::from_custom_kubeconfig(config, &Default::default()).await.expect("a configuration");
    namespace.clone_into(&mut config.default_namespace);
    Client::try_from(config).expect("a client")
}

/// Sends a request; returns the answer, or the code and the reason of a refusal.
async fn ask(client: &Client, method: &str, path: &str, body: &Value) -> Result<Value, String> {
    let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    let body = if *body == Value::Null { Vec::new() } else { body.to_string().into_bytes() };
    let request = http::Request::builder().method(method).uri(path).header("content-type", kind).body(body);
    match client.request::<Value>(request.expect("a request")).await {
        Ok(answer) => Ok(answer),
        Err(kube::Error::Api(status)) => Err(format!("{} {}", status.code, status.reason)),
        Err(error) => panic!("{method} {path}: {error}"),
    }
}

fn said(answer: Result<Value, String>, of: impl Fn(&Value) -> String) -> String {
    answer.map_or_else(|refusal| refusal, |answer| of(&answer))
}

/// A pod without a node: with one, a kubelet would have to end it before it is deleted.
fn pod(name: &str, app: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": app}},
        "spec": {"containers": [{"name": "engine", "image": "engine:1"}]}})
}

fn names(list: &Value) -> String {
    let mut names: Vec<&str> = list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|item| item["metadata"]["name"].as_str())
        .collect();
    names.sort_unstable();
    names.join(" ")
}

/// Returns the next `count` events of a watch from a version on, without bookmarks.
async fn events(client: &Client, path: &str, count: usize) -> String {
    let request = http::Request::builder().uri(path).body(Vec::new()).expect("a request");
    let stream = match client.request_events::<DynamicObject>(request).await {
        Ok(stream) => stream,
        Err(kube::Error::Api(status)) => return format!("{} {}", status.code, status.reason),
        Err(error) => panic!("{path}: {error}"),
    };
    let mut stream = std::pin::pin!(stream);
    let mut told = Vec::new();
    while told.len() < count {
        let next = tokio::time::timeout(Duration::from_secs(10), stream.try_next()).await;
        let name = |object: &DynamicObject| object.metadata.name.clone().unwrap_or_default();
        match next.expect("an event in time").expect("a watch") {
            Some(WatchEvent::Added(object)) => told.push(format!("added {}", name(&object))),
            Some(WatchEvent::Modified(object)) => told.push(format!("modified {}", name(&object))),
            Some(WatchEvent::Deleted(object)) => told.push(format!("deleted {}", name(&object))),
            Some(WatchEvent::Bookmark(_)) => {}
            Some(WatchEvent::Error(status)) => told.push(format!("{} {}", status.code, status.reason)),
            None => told.push("the end".to_owned()),
        }
    }
    told.join(", ")
}

/// Sends the requests that users of the double need; one line for each answer. Not covered: paged lists,
/// bookmarks, expired versions.
async fn transcript(client: &Client, namespace: &str) -> Vec<String> {
    let base = format!("/api/v1/namespaces/{namespace}");
    let apps = format!("/apis/apps/v1/namespaces/{namespace}/deployments");
    let leases = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases");
    let null = Value::Null;
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let version =
        |object: &Value| object["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
    let mut lines = Vec::new();
    macro_rules! line {
        ($what:literal, $said:expr) => {
            lines.push(format!("{}: {}", $what, $said))
        };
    }
    for (pod_name, app) in [("a", "vllm"), ("b", "vllm"), ("c", "other")] {
        line!("create", said(ask(client, "POST", &format!("{base}/pods"), &pod(pod_name, app)).await, name));
    }
    line!("create again", said(ask(client, "POST", &format!("{base}/pods"), &pod("a", "vllm")).await, name));
    line!("get what is not there", said(ask(client, "GET", &format!("{base}/pods/z"), &null).await, name));
    let selected = format!("{base}/pods?labelSelector=app%3Dvllm");
    let listed = ask(client, "GET", &selected, &null).await.expect("a list");
    line!("list by label", names(&listed));
    let other = format!("{base}/pods?labelSelector=app%21%3Dvllm");
    line!("list by another label", said(ask(client, "GET", &other, &null).await, names));
    let by_name = format!("{base}/pods?fieldSelector=metadata.name%3Dc");
    line!("list by name", said(ask(client, "GET", &by_name, &null).await, names));
    let from = listed["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();

    // Changes that look different through a selector.
    let patch = |pod: &str| format!("{base}/pods/{pod}");
    let label = |app: &str| json!({"metadata": {"labels": {"app": app}}});
    line!("leave a selection", said(ask(client, "PATCH", &patch("a"), &label("other")).await, name));
    line!("enter a selection", said(ask(client, "PATCH", &patch("c"), &label("vllm")).await, name));
    line!(
        "change within it",
        said(
            ask(client, "PATCH", &patch("b"), &json!({"metadata": {"annotations": {"x": "1"}}})).await,
            name
        )
    );
    let status = json!({"status": {"phase": "Running", "podIP": "10.0.0.7"}});
    let set = ask(client, "PATCH", &format!("{}/status", patch("b")), &status).await;
    line!("set a status", said(set, |pod| pod["status"]["podIP"].to_string()));
    let watched = format!("{selected}&watch=true&resourceVersion={from}&timeoutSeconds=5");
    line!("watch from the list on", events(client, &watched, 4).await);

    // Versions.
    let before = ask(client, "GET", &patch("b"), &null).await.expect("it is there");
    let unchanged =
        ask(client, "PATCH", &patch("b"), &json!({"metadata": {"annotations": {"x": "1"}}})).await;
    line!(
        "an update without a difference makes a version",
        said(unchanged, |pod| (version(pod) != version(&before)).to_string())
    );
    ask(client, "PATCH", &patch("b"), &json!({"metadata": {"annotations": {"x": "2"}}}))
        .await
        .expect("a change");
    let stale = json!({"metadata": {"resourceVersion": version(&before), "annotations": {"x": "3"}}});
    line!("patch of an old version", said(ask(client, "PATCH", &patch("b"), &stale).await, name));
    line!("update of an old version", said(ask(client, "PUT", &patch("b"), &before).await, name));
    let removed = ask(client, "PATCH", &patch("b"), &json!({"metadata": {"annotations": {"x": null}}})).await;
    line!("null removes a member", said(removed, |pod| pod["metadata"]["annotations"]["x"].to_string()));

    // Scale.
    let workload = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "decode"},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "vllm"}}, "template": {
            "metadata": {"labels": {"app": "vllm"}}, "spec": {"containers": [{"name": "engine", "image": "engine:1"}]}}}});
    line!("create a workload", said(ask(client, "POST", &apps, &workload).await, name));
    let scale = format!("{apps}/decode/scale");
    let replicas = |object: &Value| object["spec"]["replicas"].to_string();
    let read = ask(client, "GET", &scale, &null).await.expect("a scale");
    line!("read its scale", format!("{} {} {}", read["kind"], read["apiVersion"], replicas(&read)));
    line!("its selector", read["status"]["selector"].to_string());
    let to = |count: u32, version: &str| json!({"metadata": {"resourceVersion": version}, "spec": {"replicas": count}});
    line!("set its scale", said(ask(client, "PATCH", &scale, &to(3, &version(&read))).await, replicas));
    line!(
        "set it from an old version",
        said(ask(client, "PATCH", &scale, &to(4, &version(&read))).await, replicas)
    );
    line!("the workload then", said(ask(client, "GET", &format!("{apps}/decode"), &null).await, replicas));

    // Leases.
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "control"},
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15}});
    let made = ask(client, "POST", &leases, &lease).await.expect("a lease");
    let mut taken = made.clone();
    taken["spec"]["holderIdentity"] = json!("b");
    let holder = |lease: &Value| lease["spec"]["holderIdentity"].to_string();
    let path = format!("{leases}/control");
    line!("take a lease", said(ask(client, "PUT", &path, &taken).await, holder));
    taken["spec"]["holderIdentity"] = json!("c");
    line!("take it from an old version", said(ask(client, "PUT", &path, &taken).await, holder));

    // Deletion.
    let now = json!({"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0});
    line!("delete", said(ask(client, "DELETE", &patch("a"), &now).await, |_| "done".to_owned()));
    line!("delete again", said(ask(client, "DELETE", &patch("a"), &now).await, |_| "done".to_owned()));
    let all = format!("{base}/pods?watch=true&resourceVersion={from}&timeoutSeconds=5");
    let told = events(client, &all, 6).await;
    line!("watch of everything", told);
    line!("delete a lease", said(ask(client, "DELETE", &path, &null).await, |_| "done".to_owned()));
    let version = made["metadata"]["resourceVersion"].as_str().unwrap_or_default();
    let of_leases = format!("{leases}?watch=true&resourceVersion={version}&timeoutSeconds=5");
    line!("watch of its end", events(client, &of_leases, 2).await);
    lines
}

fn rule(group: &str, resource: &str, verbs: &[&str], names: &[&str]) -> Rule {
    let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
    Rule { groups: texts(&[group]), resources: texts(&[resource]), names: texts(names), verbs: texts(verbs) }
}

/// Sets rules of a Role for the user `plain`, and returns the operations that the user is then allowed.
async fn rights(admin: &Client, user: &Client, namespace: &str, real: bool) -> Vec<String> {
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "gateway"}, "rules": [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": ["decode"], "verbs": ["get"]}]});
    if real {
        let rbac = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}");
        ask(admin, "POST", &format!("{rbac}/roles"), &role).await.expect("a role");
        let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "gateway"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "gateway"},
            "subjects": [{"kind": "User", "name": "plain", "apiGroup": "rbac.authorization.k8s.io"}]});
        ask(admin, "POST", &format!("{rbac}/rolebindings"), &binding).await.expect("a binding");
        // A binding takes effect with a short delay.
        let pods = format!("/api/v1/namespaces/{namespace}/pods");
        for _ in 0..100 {
            if ask(user, "GET", &pods, &Value::Null).await.is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    let base = format!("/api/v1/namespaces/{namespace}/pods");
    let apps = format!("/apis/apps/v1/namespaces/{namespace}/deployments");
    let mut lines = Vec::new();
    for (method, path) in [
        ("GET", base.clone()),
        ("GET", format!("{base}/b")),
        ("PATCH", format!("{base}/b")),
        ("GET", format!("{apps}/decode/scale")),
        ("PATCH", format!("{apps}/decode/scale")),
        ("GET", format!("{apps}/other/scale")),
        ("GET", format!("{apps}/decode")),
    ] {
        let body = if method == "PATCH" { json!({"spec": {"replicas": 1}}) } else { Value::Null };
        let answer = said(ask(user, method, &path, &body).await, |_| "allowed".to_owned());
        lines.push(format!("{method} {}: {answer}", path.replace(namespace, "NAMESPACE")));
    }
    lines
}

#[tokio::test]
async fn the_double_answers_as_a_real_api_server_does() {
    let namespace = "contract";
    let server = ApiServer::new(1);
    let double = Client::new(server.router(), namespace);
    let mut lines = transcript(&double, namespace).await;
    server.allow(vec![
        rule("", "pods", &["get", "list"], &[]),
        rule("apps", "deployments/scale", &["get"], &["decode"]),
    ]);
    lines.extend(rights(&double, &double, namespace, false).await);
    assert_eq!(lines.join("\n") + "\n", EXPECTED, "the double");
    let (Ok(admin), Ok(user)) =
        (std::env::var("KVASIR_APISERVER_KUBECONFIG"), std::env::var("KVASIR_APISERVER_USER_KUBECONFIG"))
    else {
        println!(
            "SKIPPED the real API server: KVASIR_APISERVER_KUBECONFIG is not set; see tests/apiserver/real/run.sh"
        );
        return;
    };
    // A namespace of its own, because the lane may run several times.
    let namespace = format!("contract-{}", std::process::id());
    let (admin, user) = (client(&admin, &namespace).await, client(&user, &namespace).await);
    make_namespace(&admin, &namespace).await;
    let mut lines = transcript(&admin, &namespace).await;
    lines.extend(rights(&admin, &user, &namespace, true).await);
    assert_eq!(lines.join("\n") + "\n", EXPECTED, "the real API server");
    println!("{} answers of the real API server are those of the double", lines.len());
}

async fn make_namespace(admin: &Client, namespace: &str) {
    let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
    ask(admin, "POST", "/api/v1/namespaces", &object).await.expect("a namespace");
}

/// Returns a client of the real API server in its own namespace.
async fn real(test: &str) -> Option<(Client, String)> {
    let Ok(kubeconfig) = std::env::var("KVASIR_APISERVER_KUBECONFIG") else {
        println!("SKIPPED {test}: KVASIR_APISERVER_KUBECONFIG is not set; see tests/apiserver/real/run.sh");
        return None;
    };
    let namespace = format!("{test}-{}", std::process::id());
    let admin = client(&kubeconfig, &namespace).await;
    make_namespace(&admin, &namespace).await;
    Some((admin, namespace))
}

/// Waits until `done` returns true; returns how long that took.
async fn until(what: &str, mut done: impl AsyncFnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !done().await {
        assert!(began.elapsed() < Duration::from_secs(60), "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    began.elapsed()
}

#[tokio::test]
async fn pods_of_a_real_api_server_come_are_ready_and_leave() {
    let Some((client, namespace)) = real("pods").await else { return };
    let config = PodSourceConfig {
        namespace: Some(namespace.clone()),
        selection: Selection::Labels("app=vllm".to_owned()),
        role: None,
        port: 8000,
        relist: Duration::from_secs(300),
    };
    let source = PodSource::new(client.clone(), config);
    let roster =
        Roster::new(vec![source.name()], RemovalLimit { share: 0.5, time: Duration::from_secs(600) });
    let (mut senders, receiver) = channel(1);
    let (sender, mut state) = watch::channel(Vec::<(String, EndpointState)>::new());
    tokio::spawn(follow(roster, receiver, move |batch| {
        if let Some(endpoints) = batch.endpoints {
            sender
                .send_replace(endpoints.into_iter().map(|endpoint| (endpoint.url, endpoint.state)).collect());
        }
    }));
    tokio::spawn(source.watch(senders.remove(0)));
    let base = format!("/api/v1/namespaces/{namespace}/pods");
    let mut on_node = pod("a", "vllm");
    on_node["spec"]["nodeName"] = json!("node");
    ask(&client, "POST", &base, &on_node).await.expect("a pod");
    let ready = json!({"status": {"phase": "Running", "podIP": "10.0.0.7",
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-25T10:00:00Z"}]}});
    let began = Instant::now();
    ask(&client, "PATCH", &format!("{base}/a/status"), &ready).await.expect("a status");
    let is = |wanted: EndpointState| {
        move |all: &Vec<(String, EndpointState)>| all.iter().any(|one| one.1 == wanted)
    };
    state.wait_for(is(EndpointState::Ready)).await.expect("it goes on");
    let appeared = began.elapsed();
    let began = Instant::now();
    // With a grace period: no kubelet ends the pod.
    ask(&client, "DELETE", &format!("{base}/a"), &Value::Null).await.expect("a deletion");
    state.wait_for(is(EndpointState::Draining)).await.expect("it goes on");
    println!(
        "real API server: a pod is ready after {appeared:?}, drains {:?} after its deletion",
        began.elapsed()
    );
    let now = json!({"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0});
    ask(&client, "DELETE", &format!("{base}/a"), &now).await.expect("a deletion");
    state.wait_for(Vec::is_empty).await.expect("it goes on");
}

#[tokio::test]
async fn a_workload_is_scaled_and_one_leads_at_a_real_api_server() {
    let Some((client, namespace)) = real("scale").await else { return };
    let workload = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "decode"},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "vllm"}}, "template": {
            "metadata": {"labels": {"app": "vllm"}}, "spec": {"containers": [{"name": "engine", "image": "engine:1"}]}}}});
    ask(&client, "POST", &format!("/apis/apps/v1/namespaces/{namespace}/deployments"), &workload)
        .await
        .expect("it");
    let target = ScaleTarget::parse("Deployment/decode").expect("a target");
    let mut decode = Workload::new(&client, Some(&namespace), target);
    let counts = decode.read().await.expect("it is read");
    assert_eq!((counts.replicas, counts.ready), (2, 0));
    decode.set(3, &counts).await.expect("nothing has changed");
    let stale = decode.set(9, &counts).await;
    assert!(matches!(stale, Err(ScaleError::Stale(_))), "{stale:?}");
    assert_eq!(decode.read().await.expect("it is read").replicas, 3);

    let candidate = |identity: &str| {
        let (sender, leads) = watch::channel(false);
        let lease = KubernetesLease::new(client.clone(), Some(&namespace), "control", identity);
        (leads, tokio::spawn(control_discovery::election::run(lease, sender)))
    };
    let (mut first, _running) = candidate("a");
    first.wait_for(|leads| *leads).await.expect("it runs");
    let (mut second, ended) = candidate("b");
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(*first.borrow() && !*second.borrow());
    drop(first);
    let began = Instant::now();
    second.wait_for(|leads| *leads).await.expect("it runs");
    println!("real API server: another process leads {:?} after the first one's end", began.elapsed());
    drop(second);
    ended.await.expect("no panic");
}

/// The definition is accepted, a graph is reconciled into its objects, a count set by a planner stays, and a
/// role that becomes scalable keeps its count.
#[tokio::test]
async fn a_graph_is_reconciled_at_a_real_api_server() {
    let Some((client, namespace)) = real("graphs").await else { return };
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).init();
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    match ask(&client, "POST", definitions, &definition()).await {
        Ok(_) => {}
        Err(refusal) => assert_eq!(refusal, "409 AlreadyExists"),
    }
    let graphs = format!("/apis/kvasir.dev/v1alpha1/namespaces/{namespace}/kvasirgraphs");
    until("the kind", async || ask(&client, "GET", &graphs, &Value::Null).await.is_ok()).await;
    let controller = GraphController::new(client.clone(), Some(&namespace), "registry.example/kvasir:2");
    let running = tokio::spawn(controller.again_every(Duration::from_secs(2)).run());
    let spec = |max: Option<u32>| {
        let mut decode = json!({"role": "decode"});
        match max {
            Some(max) => decode["max"] = json!(max),
            None => decode["workers"] = json!(2),
        }
        json!({"model": "Qwen/Qwen3-8B", "engine": "vllm", "role": [{"role": "prefill", "workers": 2}, decode]})
    };
    let graph = json!({"apiVersion": "kvasir.dev/v1alpha1", "kind": "KvasirGraph", "metadata": {"name": "qwen"}, "spec": spec(None)});
    ask(&client, "POST", &graphs, &graph).await.expect("a graph");
    let of = |kind: &str, name: &str| format!("/apis/apps/v1/namespaces/{namespace}/{kind}/{name}");
    let decode = of("deployments", "qwen-decode");
    let made = until("the workers", async || ask(&client, "GET", &decode, &Value::Null).await.is_ok()).await;
    let replicas =
        async || ask(&client, "GET", &decode, &Value::Null).await.expect("it")["spec"]["replicas"].clone();
    assert_eq!(replicas().await, 2);
    let status = async || {
        ask(&client, "GET", &format!("{graphs}/qwen"), &Value::Null).await.expect("it")["status"].clone()
    };
    let observed = async |generation: u32| {
        let began = Instant::now();
        while status().await["observedGeneration"] != generation {
            assert!(began.elapsed() < Duration::from_secs(20), "{}", status().await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    observed(1).await;
    // The planner may set the count from now on: the controller no longer sets it.
    let change = json!({"spec": spec(Some(6))});
    ask(&client, "PATCH", &format!("{graphs}/qwen"), &change).await.expect("a change");
    observed(2).await;
    let kept = replicas().await;
    let scale = json!({"spec": {"replicas": 4}});
    ask(&client, "PATCH", &format!("{decode}/scale"), &scale).await.expect("a scale");
    let mut other = spec(Some(6));
    other["image"] = json!("vllm/vllm-openai:v0.33.0");
    ask(&client, "PATCH", &format!("{graphs}/qwen"), &json!({"spec": other})).await.expect("a change");
    observed(3).await;
    assert_eq!(replicas().await, 4, "the planner's count stays");
    let bad = json!({"spec": {"role": [{"role": "boss"}]}});
    let refused =
        ask(&client, "PATCH", &format!("{graphs}/qwen"), &bad).await.expect_err("the definition refuses it");
    assert!(refused.starts_with("422"), "{refused}");
    println!(
        "real API server: workers of a graph {made:?} after it was made; a role that may be scaled from now on has {kept} workers, \
         and 4 that a planner set stay over a change"
    );
    running.abort();
}
