//! The description of a serving graph.
//!
//! Every field name is one word, so that the TOML file and YAML have the same names. A description may come
//! from an untrusted author: no text may contain a control character, and names of Kubernetes objects are
//! validated, so that no text can become another document, directive or command of the rendered files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Longest name: parts are named after it, and Kubernetes allows 63 characters for a label's value.
const NAME_MAX: usize = 40;
/// Most workers of a role, as in the planner.
const WORKERS_MAX: u32 = 10_000;
/// Most machines of one worker, and most GPUs of one machine.
const NODES_MAX: u32 = 64;
const GPUS_MAX: u32 = 64;
/// Longest name of an object of Kubernetes (RFC 1123 subdomain).
const OBJECT_NAME_MAX: usize = 253;

/// A model with its workers and gateways.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Graph {
    /// Name of the graph, and prefix of the names of its parts.
    pub name: String,
    /// The model: a Hugging Face name, or a folder.
    #[serde(default)]
    pub model: String,
    /// Model name that clients use. Empty: `model`.
    #[serde(default)]
    pub alias: String,
    /// Engine of the workers.
    pub engine: Engine,
    /// Container image of the workers. Empty: the tested image of the engine; required if there is none.
    #[serde(default)]
    pub image: String,
    /// Arguments of the engine, for all roles.
    #[serde(default)]
    pub arguments: Vec<String>,
    /// Environment variables of the engine.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Names of Secrets whose entries are environment variables of the engine.
    #[serde(default)]
    pub secrets: Vec<String>,
    /// Folders that the engine reads or writes.
    #[serde(default)]
    pub storage: Vec<Storage>,
    /// Service level that the planner keeps.
    #[serde(default)]
    pub level: Level,
    /// Gateways in front of the workers.
    #[serde(default)]
    pub gateway: Gateway,
    /// Workers by role.
    pub role: Vec<RoleSpec>,
}

/// A supported engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// vLLM's server.
    Vllm,
    /// SGLang's server.
    Sglang,
    /// TensorRT-LLM's server.
    TensorrtLlm,
    /// The reference engine, on the CPU.
    Kvasir,
    /// Mock engines: no model, simulated time.
    Mock,
}

impl Engine {
    /// Whether the engine is a subcommand of `kvasir`.
    #[must_use]
    pub fn is_own(self) -> bool {
        matches!(self, Self::Kvasir | Self::Mock)
    }
}

/// Phases that a worker computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefills for decode workers.
    Prefill,
    /// Decodes from prompts that prefill workers computed.
    Decode,
    /// Prefills and decodes.
    Both,
}

impl Role {
    /// Returns the name in labels and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

/// Workers of one role.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoleSpec {
    /// Phases that the workers compute.
    pub role: Role,
    /// Number of workers, if no planner sets it. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// Fewest workers, if the planner sets the number.
    #[serde(default = "one")]
    pub min: u32,
    /// Most workers. If it is set, the planner sets the number. 0: no planner.
    #[serde(default)]
    pub max: u32,
    /// GPUs of a worker on one machine. Default: 1, or none for engines that compute on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u32>,
    /// Machines of one worker.
    #[serde(default = "one")]
    pub nodes: u32,
    /// CPU request, as Kubernetes writes it. Empty: no request.
    #[serde(default)]
    pub cpu: String,
    /// Memory request, as Kubernetes writes it. Empty: no request.
    #[serde(default)]
    pub memory: String,
    /// Further resources of Kubernetes, like `rdma/ib`.
    #[serde(default)]
    pub resources: BTreeMap<String, String>,
    /// Labels of the machines that may run the workers (`nodeSelector`).
    #[serde(default)]
    pub placement: BTreeMap<String, String>,
    /// Arguments of the engine, after those for all roles.
    #[serde(default)]
    pub arguments: Vec<String>,
    /// Environment variables, which override those for all roles.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
}

impl RoleSpec {
    /// Returns the number of workers, or the fewest if the planner sets the number.
    #[must_use]
    pub fn count(&self) -> u32 {
        if self.is_planned() { self.min } else { self.workers.unwrap_or(1) }
    }

    /// Returns the most workers.
    #[must_use]
    pub fn most(&self) -> u32 {
        if self.is_planned() { self.max } else { self.count() }
    }

    /// Whether the planner sets the number of workers.
    #[must_use]
    pub fn is_planned(&self) -> bool {
        self.max > 0
    }
}

/// The gateways in front of the workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Gateway {
    /// Number of gateways. With two or more, an update fails no request.
    pub replicas: u32,
    /// Image of Kvasir.
    pub image: String,
    /// Port of the OpenAI API.
    pub port: u16,
    /// Names of Secrets whose entries are files in `/etc/kvasir/secrets/NAME`, for settings that name a file.
    pub secrets: Vec<String>,
    /// Sections of `kvasir.toml`: the planner's go to the control service, all others to gateways.
    pub settings: Map<String, Value>,
}

impl Default for Gateway {
    fn default() -> Self {
        let image = concat!("kvasir:", env!("CARGO_PKG_VERSION")).to_owned();
        Self { replicas: 1, image, port: 8000, secrets: Vec::new(), settings: Map::new() }
    }
}

/// A service level.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Level {
    /// Time to first token, like `500ms`.
    pub ttft: String,
    /// Inter-token latency, like `50ms`.
    pub itl: String,
    /// Share of requests that must meet both.
    pub attainment: f64,
}

impl Default for Level {
    fn default() -> Self {
        Self { ttft: "500ms".to_owned(), itl: "50ms".to_owned(), attainment: 0.99 }
    }
}

/// A folder of the engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Storage {
    /// Path of the folder in the engine's file system.
    pub path: String,
    /// Name of a PersistentVolumeClaim of Kubernetes, or of a named volume of Compose.
    #[serde(default)]
    pub claim: String,
    /// Path of a folder of the machine.
    #[serde(default)]
    pub folder: String,
}

fn one() -> u32 {
    1
}

/// Reads a description in TOML; an error names the line or the field.
pub fn from_toml(text: &str) -> Result<Graph, String> {
    let graph: Graph = toml::from_str(text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = text[..start].matches('\n').count() + 1;
        format!("line {line}: {}", error.message())
    })?;
    graph.check().map(|()| graph)
}

/// Reads a description in YAML.
pub fn from_yaml(text: &str) -> Result<Graph, String> {
    let graph: Graph = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    graph.check().map(|()| graph)
}

/// Whether a text is the name of an object of Kubernetes (RFC 1123 subdomain).
fn is_object_name(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    let is_end = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.len() <= OBJECT_NAME_MAX
        && text.bytes().all(is_inner)
        && text.as_bytes().first().is_some_and(is_end)
        && text.as_bytes().last().is_some_and(is_end)
}

/// Whether a text is a name for objects of Kubernetes (RFC 1123 label).
fn is_label(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty()
        && text.len() <= NAME_MAX
        && text.bytes().all(is_inner)
        && text.as_bytes()[0].is_ascii_lowercase()
        && !text.ends_with('-')
}

fn is_variable(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !name.is_empty() && name.bytes().all(is_inner) && !name.as_bytes()[0].is_ascii_digit()
}

impl Graph {
    /// Returns the model name that clients use.
    #[must_use]
    pub fn served_name(&self) -> &str {
        if self.alias.is_empty() { &self.model } else { &self.alias }
    }

    /// Returns the image of the workers.
    #[must_use]
    pub fn worker_image(&self) -> &str {
        if self.image.is_empty() { crate::engine::image(self) } else { &self.image }
    }

    /// Whether there are workers that only prefill.
    #[must_use]
    pub fn has_prefill(&self) -> bool {
        self.role.iter().any(|role| role.role == Role::Prefill)
    }

    /// Whether the planner sets the number of workers of any role.
    #[must_use]
    pub fn is_planned(&self) -> bool {
        self.role.iter().any(RoleSpec::is_planned)
    }

    /// Returns the GPUs of a worker on one machine.
    #[must_use]
    pub fn gpus(&self, spec: &RoleSpec) -> u32 {
        spec.gpus.unwrap_or(if self.engine.is_own() { 0 } else { 1 })
    }

    /// Returns the GPUs of all workers at their highest counts.
    #[must_use]
    pub fn gpus_max(&self) -> u32 {
        self.role.iter().map(|spec| spec.most() * self.gpus(spec) * spec.nodes).sum()
    }

    /// Checks that prefill and decode workers of one generation run the same engine: their image must name a
    /// version.
    pub(crate) fn check_version(&self) -> Result<(), String> {
        let image = self.worker_image();
        if image.is_empty() {
            return Err("image: this engine has no default image: name one, with its version".to_owned());
        }
        let tag = image.rsplit('/').next().unwrap_or_default().split_once([':', '@']).map(|(_, tag)| tag);
        match self.has_prefill() && tag.is_none_or(|tag| tag == "latest") {
            true => Err(format!(
                "image: {image:?} names no version, and prefill and decode workers of two versions would be paired"
            )),
            false => Ok(()),
        }
    }

    /// Checks the description; an error has one line for each problem.
    pub fn check(&self) -> Result<(), String> {
        let mut wrong = Vec::new();
        if !is_label(&self.name) {
            wrong.push(format!(
                "name: {:?} is no name of up to {NAME_MAX} small letters, digits and dashes that begins with a letter",
                self.name
            ));
        }
        if self.model.is_empty() && !self.engine.is_own() {
            wrong.push("model: an engine needs a model".to_owned());
        }
        for (place, text) in [
            ("model", &self.model),
            ("alias", &self.alias),
            ("image", &self.image),
            ("gateway.image", &self.gateway.image),
        ] {
            if text.chars().any(|letter| letter.is_control() || letter.is_whitespace()) {
                wrong.push(format!("{place}: {text:?} has a blank"));
            }
        }
        self.check_roles(&mut wrong);
        self.check_environment(&mut wrong);
        for storage in &self.storage {
            let is_path = |text: &String| text.starts_with('/') && !text.contains([':', '\n', '\r']);
            let is_source = match (storage.claim.as_str(), &storage.folder) {
                ("", folder) => is_path(folder),
                (claim, folder) => is_object_name(claim) && folder.is_empty(),
            };
            if !is_path(&storage.path) || !is_source {
                wrong.push(format!(
                    "storage: {:?} needs an absolute path, and either the name of a claim or an absolute folder",
                    storage.path
                ));
            }
        }
        let mut paths: Vec<&str> = self.storage.iter().map(|storage| storage.path.as_str()).collect();
        paths.sort_unstable();
        if paths.windows(2).any(|pair| pair[0] == pair[1]) {
            wrong.push("storage: a path is there twice".to_owned());
        }
        if !(1..=64).contains(&self.gateway.replicas) || self.gateway.port == 0 {
            wrong.push("gateway: replicas are 1 to 64, and port is not 0".to_owned());
        }
        if self.every_text().any(|text| text.chars().any(char::is_control)) {
            wrong.push("a text has a line break or another control character".to_owned());
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
    }

    fn check_roles(&self, wrong: &mut Vec<String>) {
        let count = |role| self.role.iter().filter(|spec| spec.role == role).count();
        match [count(Role::Prefill), count(Role::Decode), count(Role::Both)] {
            [0, 0, 1] | [1, 1, 0] => {}
            _ => wrong.push("role: there is either one `both`, or one `prefill` and one `decode`".to_owned()),
        }
        for spec in &self.role {
            let name = spec.role.name();
            if spec.workers == Some(0) || spec.workers.unwrap_or(1).max(spec.max) > WORKERS_MAX {
                wrong.push(format!("role {name}: workers are 1 to {WORKERS_MAX}"));
            }
            match spec.workers {
                Some(_) if spec.is_planned() => wrong.push(format!(
                    "role {name}: the planner sets the number of workers of a role with max; leave workers out, or max"
                )),
                _ if spec.is_planned() && spec.min > spec.max => {
                    wrong.push(format!("role {name}: min ({}) is more than max ({})", spec.min, spec.max));
                }
                _ if !spec.is_planned() && spec.min != 1 => {
                    wrong.push(format!("role {name}: min is for the planner, which needs max as well"));
                }
                _ => {}
            }
            if spec.min == 0 {
                wrong.push(format!("role {name}: min is 1 at least: without a worker nothing is answered"));
            }
            if self.gpus(spec) > GPUS_MAX {
                wrong.push(format!("role {name}: gpus are those of one machine, {GPUS_MAX} at most"));
            }
            if !(1..=NODES_MAX).contains(&spec.nodes) {
                wrong.push(format!("role {name}: nodes are 1 to {NODES_MAX}"));
            }
            if spec.nodes > 1 && !matches!(self.engine, Engine::Vllm | Engine::Sglang) {
                wrong.push(format!("role {name}: a worker of several nodes needs engine vllm or sglang"));
            }
            for argument in self.arguments.iter().chain(&spec.arguments) {
                let option = argument.split('=').next().unwrap_or_default();
                if crate::engine::is_derived_option(self.engine, option) {
                    wrong.push(format!("arguments: {option} is derived from the description; remove it"));
                }
            }
        }
        wrong.dedup();
    }

    /// Returns every text that is rendered, except the gateway's settings, which are TOML.
    fn every_text(&self) -> impl Iterator<Item = &str> {
        fn of_role(spec: &RoleSpec) -> Vec<&str> {
            let maps = spec.resources.iter().chain(&spec.placement).chain(&spec.environment);
            let texts = maps.flat_map(|(name, value)| [name, value]);
            texts.chain(&spec.arguments).chain([&spec.cpu, &spec.memory]).map(String::as_str).collect()
        }
        let variables = self.environment.iter().flat_map(|(name, value)| [name, value]);
        let texts = variables.chain(&self.arguments).chain(&self.secrets).chain(&self.gateway.secrets);
        let storage =
            self.storage.iter().flat_map(|storage| [&storage.path, &storage.claim, &storage.folder]);
        texts.chain(storage).map(String::as_str).chain(self.role.iter().flat_map(of_role))
    }

    /// Whether any text of the description contains `part`.
    pub(crate) fn mentions(&self, part: &str) -> bool {
        self.every_text()
            .chain([self.model.as_str(), &self.alias, &self.name])
            .any(|text| text.contains(part))
            || Value::from(self.gateway.settings.clone()).to_string().contains(part)
    }

    fn check_environment(&self, wrong: &mut Vec<String>) {
        let all = self.role.iter().flat_map(|role| &role.environment).chain(&self.environment);
        for (name, _) in all {
            if name == "POD_IP" {
                wrong.push("environment: POD_IP is set here".to_owned());
            }
            if !is_variable(name) {
                wrong.push(format!("environment: {name:?} is no variable of letters, digits and _"));
            }
        }
        for secret in self.secrets.iter().chain(&self.gateway.secrets) {
            if !is_object_name(secret) {
                wrong.push(format!("secrets: {secret:?} is no name of a Secret"));
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A graph with two roles whose counts the planner sets.
    pub(crate) const DISAGGREGATED: &str = r#"
name = "qwen"
model = "Qwen/Qwen3-32B"
engine = "vllm"
arguments = ["--max-model-len", "32768"]
environment = { VLLM_LOGGING_LEVEL = "WARNING" }
secrets = ["hf-token"]
storage = [{ path = "/root/.cache/huggingface", claim = "models" }]
level = { ttft = "2s", itl = "40ms" }
gateway = { replicas = 2 }

[[role]]
role = "prefill"
max = 4
gpus = 2
resources = { "rdma/ib" = "1" }

[[role]]
role = "decode"
max = 8
gpus = 4
arguments = ["--max-num-seqs", "512"]
"#;

    #[test]
    fn toml_and_yaml_have_the_same_names() {
        let graph = from_toml(DISAGGREGATED).expect("a description");
        let yaml = crate::yaml::document(&graph).expect("YAML");
        assert_eq!(from_yaml(&yaml), Ok(graph.clone()), "{yaml}");
        assert_eq!((graph.gpus_max(), graph.is_planned(), graph.has_prefill()), (4 * 2 + 8 * 4, true, true));
        assert_eq!(graph.served_name(), "Qwen/Qwen3-32B");
    }

    #[test]
    fn mistakes_are_named_with_their_line_or_field() {
        let unknown = from_toml("name = \"a\"\nengine = \"vllm\"\nmodell = \"x\"\n").expect_err("unknown");
        assert!(unknown.starts_with("line 3: ") && unknown.contains("modell"), "{unknown}");
        let engine = from_toml("name = \"a\"\nengine = \"llama\"\n").expect_err("no engine");
        assert!(engine.starts_with("line 2: ") && engine.contains("tensorrt-llm"), "{engine}");
        let base = "model = \"m\"\nengine = \"vllm\"\nname = ";
        for (text, expected) in [
            ("\"A b\"\n[[role]]\nrole = \"both\"\n", "name: "),
            ("\"a\"\nrole = []\n", "role: there is either one"),
            ("\"a\"\n[[role]]\nrole = \"prefill\"\n", "role: there is either one"),
            ("\"a\"\n[[role]]\nrole = \"both\"\nworkers = 3\nmax = 2\n", "leave workers out, or max"),
            ("\"a\"\n[[role]]\nrole = \"both\"\nmin = 3\nmax = 2\n", "min (3) is more than max (2)"),
            ("\"a\"\n[[role]]\nrole = \"both\"\nmin = 3\n", "min is for the planner"),
            ("\"a\"\n[[role]]\nrole = \"both\"\ngpus = 65\n", "gpus are those of one machine"),
            (
                "\"a\"\nstorage = [{ path = \"/x:ro\", claim = \"y\" }]\n[[role]]\nrole = \"both\"\n",
                "storage: ",
            ),
            (
                "\"a\"\nstorage = [{ path = \"/x\", claim = \"y\\n---\" }]\n[[role]]\nrole = \"both\"\n",
                "storage: ",
            ),
            (
                "\"a\"\nstorage = [{ path = \"/x\", folder = \"y\" }]\n[[role]]\nrole = \"both\"\n",
                "storage: ",
            ),
            (
                "\"a\"\nenvironment = { A = \"1\\rExecStartPre=/x\" }\n[[role]]\nrole = \"both\"\n",
                "control character",
            ),
            ("\"a\"\narguments = [\"a\\u0007\"]\n[[role]]\nrole = \"both\"\n", "control character"),
            ("\"a\"\n[[role]]\nrole = \"both\"\nplacement = { a = \"b\\n\" }\n", "control character"),
            ("\"a\"\ngateway = { image = \"x\\n---\" }\n[[role]]\nrole = \"both\"\n", "gateway.image: "),
            ("\"a\"\n[[role]]\nrole = \"both\"\nworkers = 0\n", "workers are 1 to"),
            ("\"a\"\n[[role]]\nrole = \"both\"\nmin = 0\nmax = 2\n", "min is 1 at least"),
            ("\"a\"\n[[role]]\nrole = \"both\"\nnodes = 0\n", "nodes are 1 to"),
            ("\"a\"\n[[role]]\nrole = \"both\"\narguments = [\"--port=1\"]\n", "--port is derived"),
            ("\"a\"\nstorage = [{ path = \"x\", claim = \"y\" }]\n[[role]]\nrole = \"both\"\n", "storage: "),
            ("\"a\"\nenvironment = { \"1A\" = \"\" }\n[[role]]\nrole = \"both\"\n", "environment: "),
            ("\"a\"\nsecrets = [\"A\"]\n[[role]]\nrole = \"both\"\n", "secrets: "),
            ("\"a\"\ngateway = { replicas = 0 }\n[[role]]\nrole = \"both\"\n", "gateway: "),
        ] {
            let said = from_toml(&format!("{base}{text}")).expect_err(text);
            assert!(said.contains(expected), "{text}: {said}");
        }
        let two = from_toml("name = \"-\"\nengine = \"vllm\"\nrole = []\n").expect_err("several mistakes");
        assert_eq!(two.lines().count(), 3, "{two}");
    }
}
