//! Plain Kubernetes manifests. They need only namespaced objects of kinds that every cluster has, and
//! optionally LeaderWorkerSets or a PodCliqueSet.
//!
//! | Part | Objects |
//! | --- | --- |
//! | gateways | StatefulSet (stable names for peers), Service, headless Service, NetworkPolicy, PodDisruptionBudget |
//! | workers of a role | Deployment, StatefulSet or LeaderWorkerSet; or one PodCliqueSet for all roles |
//! | control service, if the planner acts | Deployment of two replicas, of which one acts |
//! | rights | a ServiceAccount and a Role for gateways (pods), and for the control service (`scale` of the named workloads, pods, one Lease) |
//!
//! Sources: LeaderWorkerSet `api/leaderworkerset/v1/leaderworkerset_types.go`; Grove `operator/api/core/v1alpha1/podcliqueset.go`.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::engine::{self, HEALTH, Node, Program, WorkerAddress};
use crate::graph::{Engine, Graph, Role, RoleSpec};
use crate::settings::{self, Workers};
use crate::unused::comment;
use crate::{File, Rendered, yaml};

/// HTTP port of a worker.
const PORT: u16 = 8000;
/// Port of a gateway's administrators' listener, for the control service and Prometheus.
const ADMIN_PORT: u16 = 9090;
/// Namespace of Prometheus.
const MONITORING: &str = "monitoring";
/// User and group of Kvasir's containers.
const OWN_USER: u32 = 65_532;
/// Annotation with a hash of the settings that a pod was started with.
const SETTINGS_HASH: &str = "kvasir/settings";
/// HTTP port of the control service.
const CONTROL_PORT: u16 = 8090;
/// Drain time of an engine that does not report its running requests, in seconds.
const BLIND_DRAIN_SECONDS: u32 = 60;
/// Longest drain of a worker, in seconds, as in `planner.drain`.
const DRAIN_SECONDS: u32 = 600;
/// Most characters of the names of a PodCliqueSet, a scaling group and a clique together (Grove's webhook).
const GROVE_NAMES_MAX: usize = 45;
/// Size of the shared memory of a worker's processes.
const SHARED_MEMORY: &str = "16Gi";

/// Waits until an engine was idle in two consecutive samples of its own gauges, at most for its drain time.
/// Gateways send no requests to a pod from the moment that its deletion begins.
const WAIT_IDLE: &str = "\
import re, time, urllib.request
idle, until = 0, time.monotonic() + DRAIN
while idle < 2 and time.monotonic() < until:
    time.sleep(1)
    try:
        text = urllib.request.urlopen('http://127.0.0.1:PORT/metrics', timeout=5).read().decode()
    except OSError:
        break
    gauges = re.findall(r'^\\S*num_(?:requests_(?:running|waiting)|running_reqs|queue_reqs)\\S* (\\S+)', text, re.M)
    idle = 0 if any(float(gauge) > 0 for gauge in gauges) else idle + 1
";

/// Kind of the workers' objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Workload {
    /// Deployments; LeaderWorkerSets for workers that span several machines.
    #[default]
    Auto,
    /// StatefulSets; LeaderWorkerSets for workers that span several machines.
    StatefulSet,
    /// LeaderWorkerSets for all workers.
    LeaderWorkerSet,
    /// One PodCliqueSet of Grove.
    PodCliqueSet,
}

pub(crate) fn render(graph: &Graph, workload: Workload) -> Result<Rendered, String> {
    let text = yaml::documents(&objects(graph, workload)?)?;
    let needs = needs(graph, workload);
    let head = comment("What must be there before this is applied:", &needs);
    let file = File { name: format!("{}.yaml", graph.name), text: format!("{head}---\n{text}") };
    Ok(Rendered { files: vec![file], needs, unused: Vec::new() })
}

/// Returns all objects of a graph.
pub(crate) fn objects(graph: &Graph, workload: Workload) -> Result<Vec<Value>, String> {
    check(graph, workload)?;
    let selector = format!("kvasir/graph={}", graph.name);
    let replicas = graph.gateway.replicas;
    let gateway_port = graph.gateway.port;
    let peers: Vec<String> = (0..replicas)
        .filter(|_| replicas > 1)
        .map(|number| format!("http://{0}-gateway-{number}.{0}-gateway-peers:{gateway_port}", graph.name))
        .collect();
    let workers = Workers::Pods { selector: &selector, port: PORT };
    let mut files = Map::new();
    let listen = format!("0.0.0.0:{gateway_port}");
    let admin = format!("0.0.0.0:{ADMIN_PORT}");
    let own = settings::gateway(graph, &listen, Some(&admin), &workers, &peers)?;
    let ports = settings::more_ports(&own)?;
    let own_hash = hash([own.as_str()]);
    files.insert("kvasir.toml".to_owned(), own.into());
    let targets: Vec<(Role, ScaleTarget)> =
        graph.role.iter().map(|spec| (spec.role, ScaleTarget::of(graph, spec, workload))).collect();
    let is_planned = graph.is_planned();
    let mut control_hash = String::new();
    if is_planned {
        let names: Vec<(Role, String)> =
            targets.iter().map(|(role, target)| (*role, target.text.clone())).collect();
        let gateways = format!("{}-gateway-peers:{ADMIN_PORT}", graph.name);
        let own = settings::control(graph, &names, &gateways)?;
        control_hash = hash([own.as_str()]);
        files.insert("control.toml".to_owned(), own.into());
    }
    let mut objects = vec![object(graph, "v1", "ConfigMap", "settings", json!({"data": files}))];
    objects.extend(gateways(graph, &ports, &own_hash));
    match workload {
        Workload::PodCliqueSet => objects.push(pod_clique_set(graph)),
        _ => objects.extend(graph.role.iter().map(|spec| workers_of(graph, spec, workload))),
    }
    if is_planned {
        objects.extend(control(graph, &targets, &control_hash));
    }
    Ok(objects)
}

/// Returns the prerequisites of the manifests, and warnings.
pub(crate) fn needs(graph: &Graph, workload: Workload) -> Vec<String> {
    let name = &graph.name;
    let mut needs = vec![format!(
        "the image {}, built with `--features kubernetes` (control/deploy/image/Dockerfile), where the cluster finds it",
        graph.gateway.image
    )];
    if graph.gateway.replicas > 1 {
        needs.push(format!(
            "Secret {name}-peers, which gateways show each other: kubectl create secret generic {name}-peers \
             --from-literal=key=$(openssl rand -hex 32)"
        ));
    }
    if graph.is_planned() && graph.gateway.settings.contains_key("access") {
        needs.push(format!(
            "Secret {name}-admin, whose entry `key` is an administrator's key for the control service"
        ));
    }
    let files = graph.gateway.secrets.iter();
    needs.extend(files.map(|secret| format!("Secret {secret}, whose entries are files for gateways")));
    let variables = graph.secrets.iter();
    needs.extend(
        variables.map(|secret| format!("Secret {secret}, whose entries are variables of the engines")),
    );
    let claims = graph.storage.iter().filter(|storage| !storage.claim.is_empty());
    needs.extend(claims.map(|storage| format!("PersistentVolumeClaim {}", storage.claim)));
    for (kind, what) in [("LeaderWorkerSet", "LeaderWorkerSet"), ("PodCliqueSet", "Grove")] {
        if graph.role.iter().any(|spec| self::kind(spec, workload) == kind) {
            needs.push(format!("{what} in the cluster"));
        }
    }
    if workload == Workload::PodCliqueSet && graph.role.iter().any(|spec| spec.nodes > 1) {
        needs.push("a Grove that sets GROVE_PCSG_POD_INDEX".to_owned());
    }
    needs.push(format!(
        "Prometheus, if there is one, in the namespace `{MONITORING}`: others do not reach the metrics"
    ));
    if graph.is_planned() {
        needs.push(
            "no count of a planned role in what was applied before: taking one out sets it to 1 once \
             (kubectl apply edit-last-applied)"
                .to_owned(),
        );
    }
    needs
}

/// Refuses graphs that Kubernetes, or this workload, cannot run.
fn check(graph: &Graph, workload: Workload) -> Result<(), String> {
    graph.check_version()?;
    if [ADMIN_PORT, CONTROL_PORT].contains(&graph.gateway.port) {
        return Err(format!("gateway: port {} is for administrators here", graph.gateway.port));
    }
    if workload == Workload::PodCliqueSet {
        if graph.is_planned() {
            return Err(
                "role: Grove keeps the numbers of a PodCliqueSet; leave max out, or take another workload"
                    .to_owned(),
            );
        }
        let longest = graph.role.iter().map(|spec| graph.name.len() + grove_names(spec)).max().unwrap_or(0);
        if longest > GROVE_NAMES_MAX {
            return Err(format!("name: Grove allows {} letters less", longest - GROVE_NAMES_MAX));
        }
    }
    Ok(())
}

/// Returns the number of characters that the names of a role's cliques add to that of the set.
fn grove_names(spec: &RoleSpec) -> usize {
    let name = spec.role.name().len();
    if spec.nodes > 1 { name + name + "-w".len() } else { name }
}

/// An object that the planner scales.
struct ScaleTarget {
    /// Name of the object in the form of `planner.decode_target`.
    text: String,
    group: &'static str,
    resource: &'static str,
    name: String,
}

impl ScaleTarget {
    fn of(graph: &Graph, spec: &RoleSpec, workload: Workload) -> Self {
        let name = name_of(graph, spec);
        let (text, group, resource, name) = match kind(spec, workload) {
            "Deployment" => (format!("Deployment/{name}"), "apps", "deployments", name),
            "StatefulSet" => (format!("StatefulSet/{name}"), "apps", "statefulsets", name),
            _ => (format!("LeaderWorkerSet/{name}"), "leaderworkerset.x-k8s.io", "leaderworkersets", name),
        };
        Self { text, group, resource, name }
    }
}

fn kind(spec: &RoleSpec, workload: Workload) -> &'static str {
    match workload {
        Workload::PodCliqueSet => "PodCliqueSet",
        Workload::LeaderWorkerSet => "LeaderWorkerSet",
        _ if spec.nodes > 1 => "LeaderWorkerSet",
        Workload::StatefulSet => "StatefulSet",
        Workload::Auto => "Deployment",
    }
}

fn name_of(graph: &Graph, spec: &RoleSpec) -> String {
    format!("{}-{}", graph.name, spec.role.name())
}

fn object(graph: &Graph, version: &str, kind: &str, part: &str, rest: Value) -> Value {
    let name = if part.is_empty() { graph.name.clone() } else { format!("{}-{part}", graph.name) };
    let mut object = json!({
        "apiVersion": version, "kind": kind,
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "kvasir", "app.kubernetes.io/instance": graph.name}},
    });
    merge(&mut object, rest);
    object
}

fn merge(object: &mut Value, rest: Value) {
    if let (Value::Object(object), Value::Object(rest)) = (object, rest) {
        object.extend(rest);
    }
}

/// Returns the labels that select a part's own pods.
fn part_labels(graph: &Graph, part: &str) -> Value {
    json!({
        "app.kubernetes.io/name": "kvasir", "app.kubernetes.io/instance": graph.name,
        "app.kubernetes.io/component": part,
    })
}

fn rights(graph: &Graph, part: &str, rules: &Value) -> [Value; 3] {
    let name = format!("{}-{part}", graph.name);
    [
        object(graph, "v1", "ServiceAccount", part, json!({})),
        object(graph, "rbac.authorization.k8s.io/v1", "Role", part, json!({"rules": rules})),
        object(
            graph,
            "rbac.authorization.k8s.io/v1",
            "RoleBinding",
            part,
            json!({
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
                // Without a namespace, the binding's own namespace is used.
                "subjects": [{"kind": "ServiceAccount", "name": name}],
            }),
        ),
    ]
}

fn http_probe(path: &str, port: u16, period: u32, failures: u32) -> Value {
    json!({
        "httpGet": {"path": path, "port": port}, "periodSeconds": period, "timeoutSeconds": 5,
        "failureThreshold": failures,
    })
}

/// Settings of every container of Kvasir, which needs no privileges on the machine.
pub(crate) fn own_container(image: &str, arguments: &[&str], port: u16) -> Value {
    json!({
        "name": "kvasir", "image": image, "command": ["kvasir"], "args": arguments,
        "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}],
        "readinessProbe": http_probe("/readyz", port, 2, 2),
        "livenessProbe": http_probe("/livez", port, 10, 3),
        "securityContext": {
            "allowPrivilegeEscalation": false, "runAsNonRoot": true, "runAsUser": OWN_USER,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "settings", "mountPath": "/etc/kvasir", "readOnly": true}],
    })
}

/// Returns a variable with the entry `key` of a Secret, which may be absent.
fn secret_variable(name: &str, secret: &str) -> Value {
    json!({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": "key", "optional": true}}})
}

/// Returns the volume with the files of this ConfigMap.
pub(crate) fn settings_volume(config_map: &str) -> Value {
    json!([{"name": "settings", "configMap": {"name": config_map}}])
}

fn gateways(graph: &Graph, more_ports: &[(&'static str, u16)], settings_hash: &str) -> Vec<Value> {
    let (replicas, port) = (graph.gateway.replicas, graph.gateway.port);
    let labels = part_labels(graph, "gateway");
    let mut container = own_container(
        &graph.gateway.image,
        &["gateway", "--config", "/etc/kvasir/kvasir.toml", "--log", "info"],
        port,
    );
    container["env"] = json!([secret_variable("KVASIR_PEER_KEY", &format!("{}-peers", graph.name))]);
    let opened: Vec<(&str, u16)> = [("http", port)].iter().chain(more_ports).copied().collect();
    let container_port =
        |(name, port): (&str, u16)| json!({"name": name, "containerPort": port, "protocol": "TCP"});
    container["ports"] = opened.iter().copied().chain([("admin", ADMIN_PORT)]).map(container_port).collect();
    let mut volumes = settings_volume(&format!("{}-settings", graph.name));
    for secret in &graph.gateway.secrets {
        let path = format!("/etc/kvasir/secrets/{secret}");
        push(&mut container["volumeMounts"], json!({"name": secret, "mountPath": path, "readOnly": true}));
        // Kvasir refuses key files that all users can read.
        push(&mut volumes, json!({"name": secret, "secret": {"secretName": secret, "defaultMode": 0o440}}));
    }
    let spec = json!({
        "replicas": replicas, "serviceName": format!("{}-gateway-peers", graph.name),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {
                "labels": labels,
                "annotations": {
                    "prometheus.io/scrape": "true", "prometheus.io/port": ADMIN_PORT.to_string(),
                    // Changed settings replace the pods.
                    SETTINGS_HASH: settings_hash,
                },
            },
            "spec": {
                "serviceAccountName": format!("{}-gateway", graph.name),
                // Streams can end before the process is killed.
                "terminationGracePeriodSeconds": DRAIN_SECONDS,
                "securityContext": {"fsGroup": OWN_USER},
                "containers": [container], "volumes": volumes,
            },
        },
    });
    let service_port = |(name, port): (&str, u16)| json!({"name": name, "port": port, "targetPort": name, "protocol": "TCP"});
    let ports: Vec<Value> = opened.iter().copied().map(service_port).collect();
    let rules = json!([{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]);
    let mut objects = rights(graph, "gateway", &rules).to_vec();
    objects.push(object(graph, "apps/v1", "StatefulSet", "gateway", json!({"spec": spec})));
    objects.push(object(graph, "v1", "Service", "", json!({"spec": {"selector": labels, "ports": ports}})));
    let admin = json!({"name": "admin", "port": ADMIN_PORT, "targetPort": "admin", "protocol": "TCP"});
    let headless = json!({
        "clusterIP": "None", "selector": labels, "ports": ports.iter().cloned().chain([admin]).collect::<Vec<Value>>(),
        // A starting gateway loads the state of its peers.
        "publishNotReadyAddresses": true,
    });
    objects.push(object(graph, "v1", "Service", "gateway-peers", json!({"spec": headless})));
    // Clients of the administrators' listener may change the roster.
    let control = json!({"podSelector": {"matchLabels": part_labels(graph, "control")}});
    let prometheus =
        json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": MONITORING}}});
    let spec = json!({
        "podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": opened.iter().map(|(name, _)| json!({"port": name})).collect::<Vec<Value>>()},
            {"ports": [{"port": "admin"}], "from": [control, prometheus]},
        ],
    });
    objects.push(object(graph, "networking.k8s.io/v1", "NetworkPolicy", "gateway", json!({"spec": spec})));
    if replicas > 1 {
        let spec = json!({"maxUnavailable": 1, "selector": {"matchLabels": labels}});
        objects.push(object(graph, "policy/v1", "PodDisruptionBudget", "gateway", json!({"spec": spec})));
    }
    objects
}

/// Returns the labels of a worker's pods: gateways select by the first, and read the others.
fn worker_labels(graph: &Graph, spec: &RoleSpec) -> Value {
    json!({
        "kvasir/graph": graph.name, "kvasir/role": spec.role.name(), "kvasir/generation": generation(graph),
        "app.kubernetes.io/name": "kvasir-worker", "app.kubernetes.io/instance": graph.name,
        "app.kubernetes.io/component": spec.role.name(),
    })
}

/// Returns a hash of the image, the commands and the environment of all roles: prefill and decode workers of
/// two generations are never paired, so an update does not need an engine that can read the blocks of another
/// version.
fn generation(graph: &Graph) -> String {
    let mut texts = vec![graph.worker_image().to_owned()];
    for spec in &graph.role {
        let Program { command, environment } = worker_program(graph, spec, None);
        texts.extend(command);
        texts.extend(environment.into_iter().flat_map(|(name, value)| [name, value]));
    }
    hash(texts.iter().map(String::as_str))
}

/// FNV-1a of texts: equal on every machine and in every version of this program.
fn hash<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in texts.into_iter().flat_map(|text| text.bytes().chain([0])) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{hash:016x}")
}

fn push(list: &mut Value, item: Value) {
    if let Some(list) = list.as_array_mut() {
        list.push(item);
    }
}

fn worker_program(graph: &Graph, spec: &RoleSpec, node: Option<Node<'_>>) -> Program {
    // The kubelet replaces `$(NAME)` with a variable; texts of the description must stay literal.
    let literal = |text: &String| text.replace('$', "$$");
    let literals = |map: &BTreeMap<String, String>| {
        map.iter().map(|(name, value)| (name.clone(), literal(value))).collect()
    };
    let mut graph = graph.clone();
    graph.model = literal(&graph.model);
    graph.alias = literal(&graph.alias);
    graph.arguments = graph.arguments.iter().map(literal).collect();
    graph.environment = literals(&graph.environment);
    let mut spec = spec.clone();
    spec.arguments = spec.arguments.iter().map(literal).collect();
    spec.environment = literals(&spec.environment);
    let place = WorkerAddress { listen: "0.0.0.0", own: "$(POD_IP)", port: PORT, node };
    engine::program(&graph, &spec, &place)
}

/// Returns the pod of a worker, or of one machine of a worker.
fn worker_pod(graph: &Graph, spec: &RoleSpec, node: Option<Node<'_>>) -> Value {
    let serves = node.as_ref().is_none_or(|node| node.rank == "0");
    let Program { command, environment } = worker_program(graph, spec, node);
    let mut variables =
        vec![json!({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})];
    variables.extend(environment.iter().map(|(name, value)| json!({"name": name, "value": value})));
    let mut resources: Map<String, Value> =
        spec.resources.iter().map(|(name, count)| (name.clone(), count.as_str().into())).collect();
    let gpus = graph.gpus(spec);
    if gpus > 0 {
        resources.insert("nvidia.com/gpu".to_owned(), gpus.to_string().into());
    }
    let mut requests = Map::new();
    for (name, amount) in [("cpu", &spec.cpu), ("memory", &spec.memory)] {
        if !amount.is_empty() {
            requests.insert(name.to_owned(), amount.as_str().into());
        }
    }
    let mut mounts = vec![json!({"name": "shared-memory", "mountPath": "/dev/shm"})];
    let mut volumes =
        vec![json!({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}})];
    for (number, storage) in graph.storage.iter().enumerate() {
        let name = format!("storage-{number}");
        mounts.push(json!({"name": name, "mountPath": storage.path}));
        volumes.push(match storage.claim.is_empty() {
            true => json!({"name": name, "hostPath": {"path": storage.folder, "type": "DirectoryOrCreate"}}),
            false => json!({"name": name, "persistentVolumeClaim": {"claimName": storage.claim}}),
        });
    }
    let mut container = json!({
        "name": "engine", "image": graph.worker_image(), "command": command, "env": variables,
        "resources": {"limits": resources, "requests": requests}, "volumeMounts": mounts,
    });
    if !graph.secrets.is_empty() {
        let secrets = graph.secrets.iter().map(|name| json!({"secretRef": {"name": name}}));
        container["envFrom"] = secrets.collect();
    }
    if spec.resources.keys().any(|name| name.starts_with("rdma/")) {
        // Registered memory is locked.
        container["securityContext"] = json!({"capabilities": {"add": ["IPC_LOCK"]}});
    }
    if serves {
        container["ports"] = json!([{"name": "http", "containerPort": PORT, "protocol": "TCP"}]);
        // Loading the weights may take an hour.
        container["startupProbe"] = http_probe(HEALTH, PORT, 10, 360);
        container["readinessProbe"] = http_probe(HEALTH, PORT, 5, 2);
        // A busy engine answers late: only an engine that has hung for minutes is restarted.
        container["livenessProbe"] = http_probe(HEALTH, PORT, 15, 12);
        let hook = match graph.engine {
            Engine::Kvasir | Engine::Mock => None,
            // TensorRT-LLM has no gauges of running requests.
            Engine::TensorrtLlm => Some(json!(["sleep", BLIND_DRAIN_SECONDS.to_string()])),
            Engine::Vllm | Engine::Sglang => {
                let script =
                    WAIT_IDLE.replace("PORT", &PORT.to_string()).replace("DRAIN", &DRAIN_SECONDS.to_string());
                Some(json!(["python3", "-c", script]))
            }
        };
        if let Some(command) = hook {
            container["lifecycle"] = json!({"preStop": {"exec": {"command": command}}});
        }
    }
    let mut pod = json!({
        "terminationGracePeriodSeconds": DRAIN_SECONDS + 60, "containers": [container], "volumes": volumes,
    });
    if !spec.placement.is_empty() {
        pod["nodeSelector"] = json!(spec.placement);
    }
    if gpus > 0 {
        pod["tolerations"] = json!([{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]);
    }
    pod
}

/// Returns the template of a worker's pod.
fn template(graph: &Graph, spec: &RoleSpec, node: Option<Node<'_>>) -> Value {
    let mut labels = worker_labels(graph, spec);
    if node.as_ref().is_some_and(|node| node.rank != "0")
        && let Some(labels) = labels.as_object_mut()
    {
        // Only the first machine serves HTTP: gateways must not find the other machines.
        labels.shift_remove("kvasir/graph");
    }
    let mut metadata = json!({"labels": labels});
    if !graph.served_name().is_empty() {
        // A label is too short for some model names.
        metadata["annotations"] =
            json!({"kvasir/model": graph.served_name(), "kvasir/port": PORT.to_string()});
    }
    json!({"metadata": metadata, "spec": worker_pod(graph, spec, node)})
}

fn workers_of(graph: &Graph, spec: &RoleSpec, workload: Workload) -> Value {
    let part = spec.role.name();
    let labels = part_labels(graph, part);
    let mut selector = labels.clone();
    selector["app.kubernetes.io/name"] = "kvasir-worker".into();
    match kind(spec, workload) {
        "LeaderWorkerSet" => {
            let leader = |rank| Some(Node { rank, leader: "$(LWS_LEADER_ADDRESS)" });
            let node = |rank| if spec.nodes > 1 { leader(rank) } else { None };
            let mut group = json!({
                "size": spec.nodes, "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": template(graph, spec, node("$(LWS_WORKER_INDEX)")),
            });
            if spec.nodes > 1 {
                group["leaderTemplate"] = template(graph, spec, node("0"));
            }
            let mut rest = json!({
                "leaderWorkerTemplate": group,
                "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling_update(spec)},
            });
            set_replicas(&mut rest, spec);
            object(graph, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", part, json!({"spec": rest}))
        }
        kind => {
            let mut rest =
                json!({"selector": {"matchLabels": selector}, "template": template(graph, spec, None)});
            set_replicas(&mut rest, spec);
            if kind == "StatefulSet" {
                rest["serviceName"] = name_of(graph, spec).into();
                rest["podManagementPolicy"] = "Parallel".into();
            } else {
                rest["strategy"] = json!({"rollingUpdate": rolling_update(spec)});
                rest["progressDeadlineSeconds"] = 3900.into();
            }
            object(graph, "apps/v1", kind, part, json!({"spec": rest}))
        }
    }
}

/// Returns the update strategy: a possibly single worker is replaced after the new one is ready; otherwise
/// there may be no GPU for a further worker.
fn rolling_update(spec: &RoleSpec) -> Value {
    let (surge, unavailable) = if spec.count() == 1 { (1, 0) } else { (0, 1) };
    json!({"maxSurge": surge, "maxUnavailable": unavailable})
}

/// Sets the replicas, except if the planner sets them: a count in the manifest would undo its decision each
/// time that the manifest is applied.
fn set_replicas(object: &mut Value, spec: &RoleSpec) {
    if !spec.is_planned() {
        object["replicas"] = spec.count().into();
    }
}

/// Returns all roles as one set that is scheduled together.
fn pod_clique_set(graph: &Graph) -> Value {
    let (mut cliques, mut groups) = (Vec::new(), Vec::new());
    let clique = |spec: &RoleSpec, name: &str, [replicas, least]: [u32; 2], node: Option<Node<'_>>| {
        let template = template(graph, spec, node);
        let mut clique = json!({
            "name": name, "labels": template["metadata"]["labels"],
            "spec": {"roleName": name, "replicas": replicas, "minAvailable": least, "podSpec": template["spec"]},
        });
        if let Some(annotations) = template["metadata"].get("annotations") {
            clique["annotations"] = annotations.clone();
        }
        clique
    };
    for spec in &graph.role {
        let name = spec.role.name();
        if spec.nodes == 1 {
            cliques.push(clique(spec, name, [spec.count(), 1], None));
            continue;
        }
        let (first, rest) = (format!("{name}-l"), format!("{name}-w"));
        // Pod 0 of the leader's clique, in the group's headless Service.
        let leader = format!("$(GROVE_PCSG_NAME)-$(GROVE_PCSG_INDEX)-{first}-0.$(GROVE_HEADLESS_SERVICE)");
        cliques.push(clique(spec, &first, [1, 1], Some(Node { rank: "0", leader: &leader })));
        let rank = "$(GROVE_PCSG_POD_INDEX)";
        // All other machines are required: some of a worker's machines are no worker.
        let others = spec.nodes - 1;
        cliques.push(clique(spec, &rest, [others, others], Some(Node { rank, leader: &leader })));
        groups.push(
            json!({"name": name, "cliqueNames": [first, rest], "replicas": spec.count(), "minAvailable": 1}),
        );
    }
    let mut template = json!({
        "cliqueStartupType": "CliqueStartupTypeAnyOrder",
        "headlessServiceConfig": {"publishNotReadyAddresses": true}, "cliques": cliques,
    });
    if !groups.is_empty() {
        template["podCliqueScalingGroups"] = groups.into();
    }
    let spec = json!({"replicas": 1, "template": template});
    object(graph, "grove.io/v1alpha1", "PodCliqueSet", "", json!({"spec": spec}))
}

fn control(graph: &Graph, targets: &[(Role, ScaleTarget)], settings_hash: &str) -> Vec<Value> {
    let labels = part_labels(graph, "control");
    let mut container = own_container(
        &graph.gateway.image,
        &["control", "--config", "/etc/kvasir/control.toml", "--log", "info"],
        CONTROL_PORT,
    );
    container["env"] = json!([secret_variable("KVASIR_KEY", &format!("{}-admin", graph.name))]);
    let spec = json!({
        "replicas": 2, "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels, "annotations": {SETTINGS_HASH: settings_hash}},
            "spec": {
                "serviceAccountName": format!("{}-control", graph.name),
                "containers": [container], "volumes": settings_volume(&format!("{}-settings", graph.name)),
            },
        },
    });
    let mut rules: Vec<Value> = targets
        .iter()
        .map(|(_, target)| {
            json!({
                "apiGroups": [target.group], "resources": [format!("{}/scale", target.resource)],
                "resourceNames": [target.name], "verbs": ["get", "patch"],
            })
        })
        .collect();
    let lease = format!("{}-control", graph.name);
    rules.push(json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}));
    rules.push(json!({
        "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [lease],
        "verbs": ["get", "update"],
    }));
    // `create` cannot be restricted to a name.
    rules.push(json!({"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]}));
    let mut objects = rights(graph, "control", &json!(rules)).to_vec();
    objects.push(object(graph, "apps/v1", "Deployment", "control", json!({"spec": spec})));
    objects
}
