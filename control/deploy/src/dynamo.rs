//! NVIDIA Dynamo's `DynamoGraphDeployment`, of `nvidia.com/v1alpha1` (`spec.services`) and `v1beta1` (`spec.components`).
//!
//! Every field is either converted to a part of a [`Graph`], or skipped with a reason. Engines are started by
//! their own servers and not by Dynamo's: options that Dynamo itself reads are skipped, all others are passed
//! on to the engine.
//!
//! Source: `ai-dynamo/dynamo` `deploy/operator/api/{v1alpha1,v1beta1}/dynamographdeployment_types.go`,
//! `components/src/dynamo/{vllm,sglang,trtllm}/backend_args.py`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::graph::{Engine, Gateway, Graph, Level, Role, RoleSpec, Storage};

/// Outcome of reading one field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Path of the field.
    pub field: String,
    /// Whether the field was converted.
    pub is_taken: bool,
    /// Result of the conversion, or the reason for skipping the field.
    pub text: String,
}

/// Fields of an object that are not yet processed.
struct Fields<'a> {
    path: String,
    left: Map<String, Value>,
    notes: &'a mut Vec<Note>,
}

impl<'a> Fields<'a> {
    fn new(path: String, value: Value, notes: &'a mut Vec<Note>) -> Self {
        let left = match value {
            Value::Object(fields) => fields,
            Value::Null => Map::new(),
            other => {
                let text = format!("it is no object, but {other}");
                notes.push(Note { field: path.clone(), is_taken: false, text });
                Map::new()
            }
        };
        Self { path, left, notes }
    }

    fn note(&mut self, name: &str, is_taken: bool, text: impl Into<String>) {
        let field = if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) };
        self.notes.push(Note { field, is_taken, text: text.into() });
    }

    /// Removes and returns a field without a note.
    fn remove(&mut self, name: &str) -> Option<Value> {
        self.left.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Removes a nested object and returns its fields.
    fn within(&mut self, name: &str) -> Fields<'_> {
        let value = self.remove(name).unwrap_or_default();
        let path = if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) };
        Fields::new(path, value, self.notes)
    }

    fn text(&mut self, name: &str, taken_as: &str) -> Option<String> {
        let value = self.remove(name)?;
        match scalar(&value) {
            Some(text) => {
                self.note(name, true, taken_as);
                Some(text)
            }
            None => {
                self.note(name, false, "it is no text");
                None
            }
        }
    }

    fn count(&mut self, name: &str, taken_as: &str) -> Option<u32> {
        let value = self.remove(name)?;
        let count = scalar(&value).and_then(|text| text.parse().ok());
        match count {
            Some(count) => {
                self.note(name, true, taken_as);
                Some(count)
            }
            None => {
                self.note(name, false, format!("{value} is no count"));
                None
            }
        }
    }

    /// Skips these fields, if present, with a reason.
    fn leave(&mut self, names: &[&str], reason: &str) {
        for name in names {
            if self.remove(name).is_some() {
                self.note(name, false, reason);
            }
        }
    }

    /// Skips all fields that were not processed.
    fn end(mut self) {
        for name in self.left.keys().cloned().collect::<Vec<_>>() {
            self.note(&name, false, "Kvasir has no equivalent");
        }
    }
}

/// Returns a scalar as text.
fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        _ => None,
    }
}

/// Reads a `DynamoGraphDeployment`; an error gives the reason why it cannot be converted to a graph. The
/// result is not validated: see [`Graph::check`].
pub fn from_dynamo(text: &str) -> Result<(Graph, Vec<Note>), String> {
    let document: Value = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    let mut notes = Vec::new();
    let graph = {
        let mut all = Fields::new(String::new(), document, &mut notes);
        all.remove("apiVersion");
        all.remove("status");
        if all.remove("kind").as_ref().and_then(Value::as_str) != Some("DynamoGraphDeployment") {
            return Err("kind: it is no DynamoGraphDeployment".to_owned());
        }
        let mut metadata = all.within("metadata");
        let name = metadata.text("name", "name").map(|name| label(&name)).unwrap_or_default();
        metadata.leave(&["namespace"], "kubectl's --namespace says where the manifests go");
        metadata.end();
        let graph = read_spec(name, all.within("spec"));
        all.end();
        graph?
    };
    Ok((graph, notes))
}

/// Whether a document is a `DynamoGraphDeployment`.
#[must_use]
pub fn is_dynamo(text: &str) -> bool {
    serde_saphyr::from_str::<Value>(text).is_ok_and(|document| document["kind"] == "DynamoGraphDeployment")
}

/// Converts a name to lower-case letters, digits and dashes, as names of this crate require.
fn label(name: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
    let plain = name.to_ascii_lowercase().replace(|letter| !is_plain(letter), "-");
    plain.chars().take(40).collect::<String>().trim_matches('-').to_owned()
}

fn read_spec(name: String, mut spec: Fields<'_>) -> Result<Graph, String> {
    let framework = spec.text("backendFramework", "engine");
    let mut graph = Graph {
        name,
        model: String::new(),
        alias: String::new(),
        engine: framework.as_deref().and_then(engine_named).unwrap_or(Engine::Vllm),
        image: String::new(),
        arguments: Vec::new(),
        environment: BTreeMap::new(),
        secrets: Vec::new(),
        storage: Vec::new(),
        level: Level::default(),
        gateway: Gateway::default(),
        role: Vec::new(),
    };
    let mut knows_engine = framework.as_deref().and_then(engine_named).is_some();
    for list in ["envs", "env"] {
        if let Some(variables) = spec.remove(list) {
            graph.environment.extend(read_variables(&mut spec, list, &variables));
        }
    }
    let claims = read_claims(&mut spec);
    let mut components: Vec<(String, Value)> = Vec::new();
    if let Some(Value::Object(services)) = spec.remove("services") {
        let path = |name: &str| format!("services.{name}");
        components.extend(services.into_iter().map(|(name, value)| (path(&name), value)));
    }
    if let Some(Value::Array(list)) = spec.remove("components") {
        let path = |(number, value): (usize, Value)| {
            let name = value["name"].as_str().map_or_else(|| number.to_string(), str::to_owned);
            (format!("components.{name}"), value)
        };
        components.extend(list.into_iter().enumerate().map(path));
    }
    let mut workers = Vec::new();
    for (path, value) in components {
        let path = format!("{}.{path}", spec.path);
        let fields = Fields::new(path, value, spec.notes);
        if let Some(worker) = read_component(fields, &mut graph, &claims) {
            if let Some(engine) = worker.engine.filter(|_| !knows_engine) {
                (graph.engine, knows_engine) = (engine, true);
            }
            workers.push(worker);
        }
    }
    spec.leave(&["annotations", "labels", "priorityClassName"], "add it to the manifests");
    spec.leave(
        &["restart", "topologyConstraint", "experimental", "providerOverride"],
        "it is for Dynamo's operator",
    );
    spec.end();
    place_workers(&mut graph, workers)?;
    Ok(graph)
}

/// Adds the workers as roles of the graph. Two workers that Dynamo's options do not distinguish are
/// distinguished by their names, and common values of all workers go to the graph.
fn place_workers(graph: &mut Graph, workers: Vec<Worker>) -> Result<(), String> {
    if workers.is_empty() {
        return Err("spec: there is no worker in it".to_owned());
    }
    let has_prefill = workers.iter().any(|worker| worker.role == Some(Role::Prefill));
    let first = |of: fn(&Worker) -> &String| {
        workers.iter().map(of).find(|text| !text.is_empty()).cloned().unwrap_or_default()
    };
    graph.model = first(|worker| &worker.model);
    graph.alias = first(|worker| &worker.alias);
    graph.image = first(|worker| &worker.image);
    for worker in workers {
        let role = match worker.role {
            Some(role) => role,
            // Decode workers of older versions have no option for their role.
            None if has_prefill => Role::Decode,
            None => Role::Both,
        };
        if graph.role.iter().any(|known| known.role == role) {
            return Err(format!(
                "spec: there are several workers for {}: a graph has one of each role",
                role.name()
            ));
        }
        if !worker.image.is_empty() && worker.image != graph.image {
            return Err(format!("spec: workers have two images, {} and {}", graph.image, worker.image));
        }
        let mut spec = worker.spec;
        spec.role = role;
        graph.role.push(spec);
    }
    graph.role.sort_by_key(|spec| spec.role != Role::Prefill);
    Ok(())
}

fn engine_named(name: &str) -> Option<Engine> {
    match name {
        "vllm" => Some(Engine::Vllm),
        "sglang" => Some(Engine::Sglang),
        "trtllm" => Some(Engine::TensorrtLlm),
        _ => None,
    }
}

/// Reads variables with a literal value; others are skipped.
fn read_variables(fields: &mut Fields<'_>, list: &str, variables: &Value) -> BTreeMap<String, String> {
    let mut taken = BTreeMap::new();
    for (number, variable) in variables.as_array().into_iter().flatten().enumerate() {
        let name = variable["name"].as_str().unwrap_or_default();
        let path = format!("{list}[{}]", if name.is_empty() { number.to_string() } else { name.to_owned() });
        if name.starts_with("DYN_") {
            fields.note(&path, false, "Dynamo's own");
        } else if let Some(value) = scalar(&variable["value"]) {
            fields.note(&path, true, "environment");
            taken.insert(name.to_owned(), value);
        } else {
            fields.note(&path, false, "only values are taken; a Secret's entries come by `secrets`");
        }
    }
    taken
}

/// Reads the names of PersistentVolumeClaims.
fn read_claims(spec: &mut Fields<'_>) -> Vec<String> {
    let mut claims = Vec::new();
    for claim in spec.remove("pvcs").as_ref().and_then(Value::as_array).into_iter().flatten() {
        let Some(name) = claim["name"].as_str() else { continue };
        let path = format!("pvcs[{name}]");
        match claim["create"] == true {
            true => spec.note(&path, false, "the claim must exist: make it beforehand"),
            false => spec.note(&path, true, "storage, where a worker mounts it"),
        }
        claims.push(name.to_owned());
    }
    claims
}

/// A worker of a Dynamo description.
struct Worker {
    role: Option<Role>,
    engine: Option<Engine>,
    model: String,
    alias: String,
    image: String,
    spec: RoleSpec,
}

/// Reads one component; `None` if it is no worker.
fn read_component(mut fields: Fields<'_>, graph: &mut Graph, claims: &[String]) -> Option<Worker> {
    let kind = fields.remove("componentType").or_else(|| fields.remove("type"));
    let kind = kind.as_ref().and_then(Value::as_str).unwrap_or("worker").to_owned();
    let sub_kind = fields.remove("subComponentType");
    let sub_kind = sub_kind.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned();
    match kind.as_str() {
        "frontend" => {
            fields.note("componentType", true, "gateway");
            if let Some(replicas) = fields.count("replicas", "gateway.replicas") {
                graph.gateway.replicas = replicas.max(1);
            }
            fields.left.clear();
            fields.note(
                "*",
                false,
                "Kvasir's gateway takes the frontend's place: its image, options and probes are its own",
            );
            return None;
        }
        "planner" => {
            fields.note(
                "componentType",
                false,
                "`kvasir control` plans: set `max` of the roles, and `level`",
            );
            return None;
        }
        "epp" => {
            fields.note("componentType", false, "every gateway is an endpoint picker (`[picker]`)");
            return None;
        }
        _ => {}
    }
    let mut worker = Worker {
        role: [kind.as_str(), sub_kind.as_str()].into_iter().find_map(role_named),
        engine: None,
        model: String::new(),
        alias: String::new(),
        image: String::new(),
        spec: RoleSpec {
            role: Role::Both,
            workers: Some(1),
            min: 1,
            max: 0,
            gpus: Some(0),
            nodes: 1,
            cpu: String::new(),
            memory: String::new(),
            resources: BTreeMap::new(),
            placement: BTreeMap::new(),
            arguments: Vec::new(),
            environment: BTreeMap::new(),
        },
    };
    fields.note("componentType", true, "role");
    fields.remove("name");
    match fields.remove("replicas").as_ref().and_then(scalar).and_then(|text| text.parse().ok()) {
        Some(0) => fields.note("replicas", false, "a role has one worker at least: 1"),
        Some(workers) => {
            fields.note("replicas", true, "role.workers");
            worker.spec.workers = Some(workers);
        }
        None => {}
    }
    let mut several = fields.within("multinode");
    if let Some(nodes) = several.count("nodeCount", "role.nodes") {
        worker.spec.nodes = nodes;
    }
    several.end();
    read_resources(fields.within("resources"), &mut worker.spec);
    if let Some(secret) = fields.text("envFromSecret", "secrets") {
        add_secret(graph, secret);
    }
    if let Some(variables) = fields.remove("envs") {
        worker.spec.environment.extend(read_variables(&mut fields, "envs", &variables));
    }
    read_mounts(&mut fields, "mountPoint", graph, claims);
    // The pod is beside the component in one API version, and around it in the other.
    let mut pod = fields.within("extraPodSpec");
    read_container(pod.within("mainContainer"), &mut worker, graph, claims);
    read_pod(pod, &mut worker, graph, claims);
    let mut template = fields.within("podTemplate");
    template.leave(&["metadata"], "add it to the manifests");
    read_pod(template.within("spec"), &mut worker, graph, claims);
    template.end();
    fields.leave(
        &["sharedMemory", "sharedMemorySize"],
        "workers get 16 GiB of shared memory; change it in the manifests",
    );
    fields.leave(
        &["livenessProbe", "readinessProbe"],
        "Dynamo's port for probes is not there: the engine's own /health is asked",
    );
    fields.leave(&["autoscaling", "scalingAdapter"], "set `max` of the role, and `kvasir control` scales it");
    fields.leave(
        &["dynamoNamespace", "globalDynamoNamespace", "serviceName", "modelRef"],
        "Kvasir finds workers by their labels",
    );
    fields.leave(&["ingress", "annotations", "labels", "extraPodMetadata"], "add it to the manifests");
    fields.end();
    Some(worker)
}

fn role_named(name: &str) -> Option<Role> {
    match name {
        "prefill" => Some(Role::Prefill),
        "decode" => Some(Role::Decode),
        _ => None,
    }
}

fn add_secret(graph: &mut Graph, secret: String) {
    if !graph.secrets.contains(&secret) {
        graph.secrets.push(secret);
    }
}

/// Reads `requests` and `limits`, in Dynamo's form (`gpu`, `custom`) and in Kubernetes' (`nvidia.com/gpu`).
fn read_resources(mut resources: Fields<'_>, spec: &mut RoleSpec) {
    for list in ["requests", "limits"] {
        let mut amounts = resources.within(list);
        for name in ["gpu", "nvidia.com/gpu"] {
            if let Some(gpus) = amounts.count(name, "role.gpus") {
                spec.gpus = Some(gpus);
            }
        }
        for (name, slot) in [("cpu", &mut spec.cpu), ("memory", &mut spec.memory)] {
            match list {
                "requests" => {
                    if let Some(amount) = amounts.text(name, &format!("role.{name}")) {
                        *slot = amount;
                    }
                }
                _ => amounts
                    .leave(&[name], "a worker that reaches a limit is slow or dies: only requests are taken"),
            }
        }
        amounts.leave(&["gpuType"], "nvidia.com/gpu is asked for");
        let mut further = amounts.within("custom");
        for name in further.left.keys().cloned().collect::<Vec<_>>() {
            if let Some(amount) = further.text(&name, "role.resources") {
                spec.resources.insert(name, amount);
            }
        }
        for name in amounts.left.keys().filter(|name| name.contains('/')).cloned().collect::<Vec<_>>() {
            if let Some(amount) = amounts.text(&name, "role.resources") {
                spec.resources.insert(name, amount);
            }
        }
        amounts.end();
    }
    resources.end();
}

/// Reads the mounts of claims that the graph or the pod names.
fn read_mounts(fields: &mut Fields<'_>, at: &str, graph: &mut Graph, claims: &[String]) {
    for mount in fields.remove("volumeMounts").as_ref().and_then(Value::as_array).into_iter().flatten() {
        let name = mount["name"].as_str().unwrap_or_default();
        let path = mount[at].as_str().unwrap_or_default();
        let field = format!("volumeMounts[{name}]");
        if !claims.iter().any(|claim| claim == name) || !path.starts_with('/') {
            fields.note(&field, false, "only mounts of claims with a path are taken");
            continue;
        }
        fields.note(&field, true, "storage");
        let storage = Storage { path: path.to_owned(), claim: name.to_owned(), folder: String::new() };
        if !graph.storage.contains(&storage) {
            graph.storage.push(storage);
        }
    }
}

fn read_pod(mut pod: Fields<'_>, worker: &mut Worker, graph: &mut Graph, claims: &[String]) {
    if let Some(Value::Object(labels)) = pod.remove("nodeSelector") {
        pod.note("nodeSelector", true, "role.placement");
        worker
            .spec
            .placement
            .extend(labels.into_iter().filter_map(|(name, value)| Some((name, scalar(&value)?))));
    }
    // Maps the names of volumes, which containers mount, to their claims.
    let mut known = claims.to_vec();
    let mut claimed = BTreeMap::new();
    for volume in pod.remove("volumes").as_ref().and_then(Value::as_array).into_iter().flatten() {
        let name = volume["name"].as_str().unwrap_or_default();
        match volume["persistentVolumeClaim"]["claimName"].as_str() {
            Some(claim) => {
                claimed.insert(name.to_owned(), claim.to_owned());
                known.push(name.to_owned());
            }
            None => pod.note(&format!("volumes[{name}]"), false, "only claims are taken"),
        }
    }
    let before = graph.storage.len();
    for mut container in
        pod.remove("containers").as_ref().and_then(Value::as_array).cloned().unwrap_or_default()
    {
        let name = container["name"].as_str().unwrap_or_default().to_owned();
        if name != "main" {
            pod.note(&format!("containers[{name}]"), false, "only the engine's container is taken");
            continue;
        }
        let path = format!("{}.containers[main]", pod.path);
        read_container(Fields::new(path, container.take(), pod.notes), worker, graph, &known);
    }
    // Mounts name volumes, but storage names claims.
    for storage in &mut graph.storage[before..] {
        if let Some(claim) = claimed.get(&storage.claim) {
            storage.claim.clone_from(claim);
        }
    }
    pod.leave(
        &["terminationGracePeriodSeconds"],
        "workers have eleven minutes to end their requests; change it in the manifests",
    );
    pod.end();
}

fn read_container(mut container: Fields<'_>, worker: &mut Worker, graph: &mut Graph, claims: &[String]) {
    container.remove("name");
    if let Some(image) = container.text("image", "image: it has the engine beside Dynamo") {
        worker.image = image;
    }
    let mut words = Vec::new();
    for list in ["command", "args"] {
        match container.remove(list) {
            None => {}
            Some(Value::Array(parts)) => words.extend(parts.iter().filter_map(scalar)),
            // A single text, as in some examples.
            Some(other) => words.extend(scalar(&other)),
        }
    }
    if let [shell, flag, script] = words.as_slice()
        && ["sh", "bash"].iter().any(|name| shell.ends_with(name))
        && flag == "-c"
    {
        words = script_words(&mut container, script);
    }
    read_command(&mut container, words, worker);
    for list in ["env", "envs"] {
        if let Some(variables) = container.remove(list) {
            worker.spec.environment.extend(read_variables(&mut container, list, &variables));
        }
    }
    for source in container.remove("envFrom").as_ref().and_then(Value::as_array).into_iter().flatten() {
        if let Some(secret) = source["secretRef"]["name"].as_str() {
            container.note("envFrom", true, "secrets");
            add_secret(graph, secret.to_owned());
        } else {
            container.note("envFrom", false, "only Secrets are taken");
        }
    }
    read_resources(container.within("resources"), &mut worker.spec);
    read_mounts(&mut container, "mountPath", graph, claims);
    container.leave(&["workingDir"], "the engine's server needs none of Dynamo's folders");
    container.leave(
        &["startupProbe", "livenessProbe", "readinessProbe"],
        "Dynamo's port for probes is not there: the engine's own /health is asked",
    );
    container.end();
}

/// Returns the words of the last command in a script that starts an engine, without the surrounding shell
/// commands.
fn script_words(container: &mut Fields<'_>, script: &str) -> Vec<String> {
    let Some(words) = shlex::split(&script.replace("\\\n", " ")) else {
        container.note("args", false, "quotes in the script that do not end");
        return Vec::new();
    };
    let is_operator = |word: &String| {
        let bare = word.trim_start_matches(|letter: char| letter.is_ascii_digit());
        ["&&", "||", ";", "|", ">", ">>", "<", "&"].contains(&word.as_str())
            || bare.starts_with(['>', '<', '|', ';'])
    };
    let start = words.iter().position(|word| word.starts_with("dynamo.")).unwrap_or(0);
    let begin = words[..start].iter().rposition(is_operator).map_or(0, |at| at + 1);
    let end = words[start..].iter().position(is_operator).map_or(words.len(), |at| start + at);
    if begin > 0 || end < words.len() {
        container.note("args[shell]", false, "what the script does beside starting the engine");
    }
    words[begin..end].to_vec()
}

/// Groups options with their values: each option begins with a dash and extends to the next word that does.
fn options(words: Vec<String>) -> Vec<Vec<String>> {
    let mut all: Vec<Vec<String>> = Vec::new();
    for word in words {
        let begins = word.starts_with("--")
            || (word.starts_with('-') && word.len() > 1 && !word.as_bytes()[1].is_ascii_digit());
        match all.last_mut() {
            Some(last) if !begins => last.push(word),
            _ => all.push(vec![word]),
        }
    }
    all
}

/// Options that Dynamo reads itself.
const DYNAMOS: [&str; 32] = [
    "--namespace",
    "--endpoint",
    "--kv-state-endpoint",
    "--discovery-backend",
    "--store-kv",
    "--request-plane",
    "--response-plane",
    "--event-plane",
    "--fpm-trace",
    "--dyn-tool-call-parser",
    "--dyn-reasoning-parser",
    "--dyn-default-thinking-mode",
    "--exclude-tools-when-tool-choice-none",
    "--custom-jinja-template",
    "--endpoint-types",
    "--connector",
    "--use-vllm-tokenizer",
    "--use-sglang-tokenizer",
    "--skip-tokenizer-init",
    "--sleep-mode-level",
    "--model-express-url",
    "--gms-shadow-mode",
    "--route-to-encoder",
    "--enable-multimodal",
    "--frontend-decoding",
    "--omni",
    "--publish-kv-events",
    "--publish-events-and-metrics",
    "--migration-limit",
    "--embedding-worker",
    "--modality",
    "--encode-endpoint",
];

/// Names in TensorRT-LLM's own server for Dynamo's options.
const TRTLLM: [(&str, &str); 8] = [
    ("--tensor-parallel-size", "--tp_size"),
    ("--pipeline-parallel-size", "--pp_size"),
    ("--expert-parallel-size", "--ep_size"),
    ("--max-batch-size", "--max_batch_size"),
    ("--max-num-tokens", "--max_num_tokens"),
    ("--max-seq-len", "--max_seq_len"),
    ("--max-beam-width", "--max_beam_width"),
    ("--free-gpu-memory-fraction", "--kv_cache_free_gpu_memory_fraction"),
];

fn read_command(container: &mut Fields<'_>, words: Vec<String>, worker: &mut Worker) {
    let Some(at) = words.iter().position(|word| word.starts_with("dynamo.")) else {
        if !words.is_empty() {
            container.note(
                "args",
                false,
                format!("no module of Dynamo is started there: {}", words.join(" ")),
            );
        }
        return;
    };
    let module = words[at].trim_start_matches("dynamo.");
    worker.engine = engine_named(module);
    let Some(engine) = worker.engine else {
        container.note("args", false, format!("dynamo.{module} is no engine that is known here"));
        return;
    };
    if let Some(variable) = words[at..].iter().find(|word| word.contains('$')) {
        let text = format!("{variable}: put the value of the variable in, it is not known here");
        container.note("args", false, text);
    }
    container.note("args", true, format!("engine: the options of dynamo.{module} that follow"));
    for option in options(words[at + 1..].to_vec()) {
        let (name, inline) = match option[0].split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (option[0].clone(), None),
        };
        let value = inline.or_else(|| option.get(1).cloned());
        let field = format!("args[{name}]");
        match (name.as_str(), value) {
            ("--model" | "--model-path", Some(model)) => {
                container.note(&field, true, "model");
                worker.model = model;
            }
            ("--served-model-name", Some(alias)) => {
                container.note(&field, true, "alias");
                worker.alias = alias;
            }
            ("--disaggregation-mode", Some(mode)) => {
                container.note(&field, true, "role");
                worker.role = role_named(&mode).or(worker.role);
            }
            ("--is-prefill-worker", _) => {
                container.note(&field, true, "role");
                worker.role = Some(Role::Prefill);
            }
            ("--is-decode-worker", _) => {
                container.note(&field, true, "role");
                worker.role = Some(Role::Decode);
            }
            ("--extra-engine-args" | "--override-engine-args", _) => {
                container.note(
                    &field,
                    false,
                    "a file of Dynamo's image, or options for one: put them into `arguments`",
                );
            }
            (name, _) if DYNAMOS.contains(&name) => container.note(&field, false, "Dynamo reads it itself"),
            (name, _)
                if name.starts_with("--disaggregation-")
                    || crate::engine::is_derived_option(engine, name) =>
            {
                container.note(&field, false, "it is made from the role");
            }
            (name, value) => {
                let mut kept = option.clone();
                if let Some((_, new)) =
                    TRTLLM.iter().find(|(old, _)| engine == Engine::TensorrtLlm && *old == name)
                {
                    kept = [(*new).to_owned()].into_iter().chain(value).collect();
                }
                container.note(&field, true, "role.arguments");
                worker.spec.arguments.extend(kept);
            }
        }
    }
}

#[cfg(test)]
mod tests;
