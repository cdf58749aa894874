//! The description of a serving graph.
//!
//! Every name in it is one word, so that the TOML file, YAML and the custom resource have the same names.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Longest name: parts are named after it, and Kubernetes allows 63 characters for a label's value.
const NAME_MAX: usize = 40;
/// Workers of a role at most, as for the planner.
const WORKERS_MAX: u32 = 10_000;
/// Machines of one worker at most.
const NODES_MAX: u32 = 64;

/// A model with its workers and gateways.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Graph {
    /// Name of the graph, and beginning of the names of its parts.
    pub name: String,
    /// The model: a name of Hugging Face, or a folder.
    #[serde(default)]
    pub model: String,
    /// The name that clients use for it; empty is `model`.
    #[serde(default)]
    pub alias: String,
    /// The engine that computes.
    pub engine: Engine,
    /// The engine's container image; empty is the one that its makers publish.
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
    /// Folders that the engine reads or keeps.
    #[serde(default)]
    pub storage: Vec<Storage>,
    /// The service level that the planner keeps.
    #[serde(default)]
    pub level: Level,
    /// Gateways.
    #[serde(default)]
    pub gateway: Gateway,
    /// Workers by role.
    pub role: Vec<RoleSpec>,
}

/// An engine that is known here.
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
    /// Whether it is a role of `kvasir`.
    #[must_use]
    pub fn is_own(self) -> bool {
        matches!(self, Self::Kvasir | Self::Mock)
    }
}

/// A worker's share of the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts for others.
    Prefill,
    /// Generates from prompts computed elsewhere.
    Decode,
    /// Does both.
    Both,
}

impl Role {
    /// Its name in labels and files.
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
    /// What they do.
    pub role: Role,
    /// How many. On Kubernetes the planner sets the count of a role with `max`, from one worker on.
    #[serde(default = "one")]
    pub workers: u32,
    /// Workers at least, where the planner acts.
    #[serde(default = "one")]
    pub min: u32,
    /// Workers at most; more than `min` has the planner act. 0 is `workers`.
    #[serde(default)]
    pub max: u32,
    /// GPUs of a worker on one machine.
    #[serde(default = "one")]
    pub gpus: u32,
    /// Machines of one worker.
    #[serde(default = "one")]
    pub nodes: u32,
    /// Processors, as Kubernetes writes them; empty is no request.
    #[serde(default)]
    pub cpu: String,
    /// Memory, as Kubernetes writes it; empty is no request.
    #[serde(default)]
    pub memory: String,
    /// Further resources of Kubernetes, as `rdma/ib`.
    #[serde(default)]
    pub resources: BTreeMap<String, String>,
    /// Labels of the machines that may run it.
    #[serde(default)]
    pub selector: BTreeMap<String, String>,
    /// Arguments of the engine, behind those for all roles.
    #[serde(default)]
    pub arguments: Vec<String>,
    /// Environment variables, before those for all roles.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
}

impl RoleSpec {
    /// Workers at most.
    #[must_use]
    pub fn most(&self) -> u32 {
        if self.max == 0 { self.workers } else { self.max }
    }

    /// Whether the planner is to change the number of workers.
    #[must_use]
    pub fn is_planned(&self) -> bool {
        self.max > self.min
    }
}

/// Gateways in front of the workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Gateway {
    /// How many.
    pub replicas: u32,
    /// Kvasir's image.
    pub image: String,
    /// Where clients are served.
    pub port: u16,
    /// Sections of `kvasir.toml`, which count before those that are made here.
    pub settings: Map<String, Value>,
}

impl Default for Gateway {
    fn default() -> Self {
        let image = concat!("kvasir:", env!("CARGO_PKG_VERSION")).to_owned();
        Self { replicas: 1, image, port: 8000, settings: Map::new() }
    }
}

/// A service level.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Level {
    /// Time to the first token, as `500ms`.
    pub ttft: String,
    /// Time between tokens, as `50ms`.
    pub itl: String,
    /// Share of requests that keep both.
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
    /// Where the engine sees it.
    pub path: String,
    /// A PersistentVolumeClaim of Kubernetes; a named volume of Compose.
    #[serde(default)]
    pub claim: String,
    /// A folder of the machine.
    #[serde(default)]
    pub folder: String,
}

fn one() -> u32 {
    1
}

/// Reads a description in TOML; an error says the line, or the field.
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
    /// The name that clients use for the model.
    #[must_use]
    pub fn served_name(&self) -> &str {
        if self.alias.is_empty() { &self.model } else { &self.alias }
    }

    /// The image of its workers.
    #[must_use]
    pub fn worker_image(&self) -> &str {
        if self.image.is_empty() { crate::engine::image(self) } else { &self.image }
    }

    /// Whether there are workers for prompts alone.
    #[must_use]
    pub fn has_prefill(&self) -> bool {
        self.role.iter().any(|role| role.role == Role::Prefill)
    }

    /// Whether the planner is to change a number of workers.
    #[must_use]
    pub fn is_planned(&self) -> bool {
        self.role.iter().any(RoleSpec::is_planned)
    }

    /// GPUs of all workers when there are as many as may be.
    #[must_use]
    pub fn gpus_max(&self) -> u32 {
        self.role.iter().map(|role| role.most().saturating_mul(role.gpus).saturating_mul(role.nodes)).sum()
    }

    /// All that is wrong with it, a line each.
    pub(crate) fn check(&self) -> Result<(), String> {
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
        for (place, text) in [("model", &self.model), ("alias", &self.alias), ("image", &self.image)] {
            // They stand in labels, units and scripts.
            if text.chars().any(|letter| letter.is_control() || letter.is_whitespace()) {
                wrong.push(format!("{place}: {text:?} has a blank"));
            }
        }
        self.check_roles(&mut wrong);
        self.check_environment(&mut wrong);
        for storage in &self.storage {
            let has_source = storage.claim.is_empty() != storage.folder.is_empty();
            if !storage.path.starts_with('/') || !has_source {
                wrong.push(format!(
                    "storage: {:?} needs an absolute path, and either a claim or a folder",
                    storage.path
                ));
            }
        }
        if self.gateway.replicas == 0 || self.gateway.port == 0 {
            wrong.push("gateway: replicas and port are 1 at least".to_owned());
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
            if spec.workers == 0 || spec.workers > WORKERS_MAX || spec.max > WORKERS_MAX {
                wrong.push(format!("role {name}: workers are 1 to {WORKERS_MAX}"));
            }
            if spec.max > 0 && !(spec.min..=spec.max).contains(&spec.workers) {
                wrong.push(format!(
                    "role {name}: workers ({}) are between min ({}) and max ({})",
                    spec.workers, spec.min, spec.max
                ));
            }
            if spec.role != Role::Prefill && spec.min == 0 {
                wrong.push(format!("role {name}: min is 1 at least: without a worker nothing is answered"));
            }
            if !(1..=NODES_MAX).contains(&spec.nodes) {
                wrong.push(format!("role {name}: nodes are 1 to {NODES_MAX}"));
            }
            if spec.nodes > 1 && !matches!(self.engine, Engine::Vllm | Engine::Sglang) {
                wrong.push(format!("role {name}: a worker of several nodes needs engine vllm or sglang"));
            }
            for argument in self.arguments.iter().chain(&spec.arguments) {
                let option = argument.split('=').next().unwrap_or_default();
                if crate::engine::is_made_here(self.engine, option) {
                    wrong.push(format!("arguments: {option} is set by what else the description says"));
                }
                if argument.contains(['\n', '\0']) {
                    wrong.push(format!("arguments: {argument:?} has a line break"));
                }
            }
        }
        wrong.dedup();
    }

    fn check_environment(&self, wrong: &mut Vec<String>) {
        let all = self.role.iter().flat_map(|role| &role.environment).chain(&self.environment);
        for (name, value) in all {
            if !is_variable(name) || value.contains(['\n', '\0']) {
                wrong.push(format!(
                    "environment: {name:?} is no variable of letters, digits and _ with a value of one line"
                ));
            }
        }
        for secret in &self.secrets {
            if !is_label(secret) {
                wrong.push(format!("secrets: {secret:?} is no name of a Secret"));
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Two roles that the planner changes.
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
workers = 2
max = 4
gpus = 2
resources = { "rdma/ib" = "1" }

[[role]]
role = "decode"
workers = 1
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
            (
                "\"a\"\n[[role]]\nrole = \"both\"\nworkers = 3\nmax = 2\n",
                "workers (3) are between min (1) and max (2)",
            ),
            ("\"a\"\n[[role]]\nrole = \"both\"\nworkers = 0\n", "workers are 1 to"),
            ("\"a\"\n[[role]]\nrole = \"both\"\nmin = 0\nmax = 2\n", "min is 1 at least"),
            ("\"a\"\n[[role]]\nrole = \"both\"\nnodes = 0\n", "nodes are 1 to"),
            ("\"a\"\n[[role]]\nrole = \"both\"\narguments = [\"--port=1\"]\n", "--port is set by"),
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
