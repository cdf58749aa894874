//! Command lines of engines.
//!
//! | Engine | Server | Hand-off of prefill and decode | KV events |
//! | --- | --- | --- | --- |
//! | `vllm` | `vllm serve` | NixlConnector, side channel at `http + 3000` | ZMQ at `http + 1000`, replay at `http + 2000` |
//! | `sglang` | `sglang.launch_server` | bootstrap at `http + 4000` | the same |
//! | `tensorrt-llm` | `trtllm-serve` | its cache transceiver | polled at `/kv_cache_events` |
//! | `kvasir` | `kvasir worker` | the data plane | its own |
//! | `mock` | `kvasir mock` | a mock of vLLM's | its own |
//!
//! Sources: vLLM `docs/features/nixl_connector_usage.md`, `vllm/config/kv_events.py`, "Parallelism and scaling"; SGLang
//! `docs/advanced_features/pd_disaggregation.md`, `python/sglang/srt/server_args.py`; TensorRT-LLM `docs/source/commands/trtllm-serve`.

use std::collections::BTreeMap;

use serde_json::json;

use crate::graph::{Engine, Graph, Role, RoleSpec};

/// Ports of one worker, as offsets from its HTTP port.
pub(crate) const EVENTS: u16 = 1000;
pub(crate) const REPLAY: u16 = 2000;
const SIDE_CHANNEL: u16 = 3000;
const BOOTSTRAP: u16 = 4000;

/// Addresses and port of one worker.
pub(crate) struct WorkerAddress<'a> {
    /// Address on which the worker listens.
    pub(crate) listen: &'a str,
    /// Address at which other workers reach the worker.
    pub(crate) own: &'a str,
    /// HTTP port of the worker.
    pub(crate) port: u16,
    /// Machine within a worker that spans several machines.
    pub(crate) node: Option<Node<'a>>,
}

/// A machine of a worker that spans several machines.
pub(crate) struct Node<'a> {
    /// Rank of the machine, or a variable that holds it.
    pub(crate) rank: &'a str,
    /// Address of the first machine, or a variable that holds it.
    pub(crate) leader: &'a str,
}

/// A process: its command line and environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    pub(crate) command: Vec<String>,
    pub(crate) environment: BTreeMap<String, String>,
}

/// Returns the tested image of an engine; empty if no image was tested.
pub(crate) fn image(graph: &Graph) -> &str {
    match graph.engine {
        Engine::Vllm => "vllm/vllm-openai:v0.32.0",
        // No release of these engines' images was tested.
        Engine::Sglang | Engine::TensorrtLlm => "",
        Engine::Kvasir | Engine::Mock => &graph.gateway.image,
    }
}

/// Path that answers 200 when the worker can serve.
pub(crate) const HEALTH: &str = "/health";

/// Whether an option is derived from other fields of the description.
pub(crate) fn is_derived_option(engine: Engine, option: &str) -> bool {
    let made: &[&str] = match engine {
        Engine::Vllm => &[
            "--model",
            "--host",
            "--port",
            "--served-model-name",
            "--kv-transfer-config",
            "--kv-events-config",
            "--nnodes",
            "--node-rank",
            "--master-addr",
            "--headless",
        ],
        Engine::Sglang => &[
            "--model-path",
            "--model",
            "--host",
            "--port",
            "--served-model-name",
            "--disaggregation-mode",
            "--disaggregation-bootstrap-port",
            "--kv-events-config",
            "--nnodes",
            "--node-rank",
            "--dist-init-addr",
        ],
        Engine::TensorrtLlm => &["--host", "--port", "--extra_llm_api_options", "--config"],
        Engine::Kvasir => &["--role", "--listen"],
        Engine::Mock => &["--role", "--listen", "--workers", "--model", "--events"],
    };
    made.contains(&option)
}

/// Whether a role's own arguments set the parallelism of its GPUs.
fn says_parallelism(graph: &Graph, spec: &RoleSpec) -> bool {
    const OPTIONS: [&str; 13] = [
        "--tensor-parallel-size",
        "-tp",
        "--tp",
        "--tp-size",
        "--tp_size",
        "--pipeline-parallel-size",
        "-pp",
        "--pp-size",
        "--pp_size",
        "--data-parallel-size",
        "-dp",
        "--dp-size",
        "--dp",
    ];
    let mut all = graph.arguments.iter().chain(&spec.arguments);
    all.any(|argument| OPTIONS.contains(&argument.split('=').next().unwrap_or_default()))
}

/// Returns the program of one worker.
pub(crate) fn program(graph: &Graph, spec: &RoleSpec, place: &WorkerAddress<'_>) -> Program {
    let mut environment = graph.environment.clone();
    environment.extend(spec.environment.clone());
    let mut set = |name: &str, value: String| {
        environment.entry(name.to_owned()).or_insert(value);
    };
    let port = place.port.to_string();
    let (events, replay) = (place.port + EVENTS, place.port + REPLAY);
    let bind = if place.listen == "0.0.0.0" { "*" } else { place.listen };
    let mut command: Vec<String> = Vec::new();
    let mut push = |words: &[&str]| command.extend(words.iter().map(|word| (*word).to_owned()));
    let gpus = graph.gpus(spec) * spec.nodes;
    let is_spread = gpus > 1 && !says_parallelism(graph, spec);
    let gpus = gpus.to_string();
    match graph.engine {
        Engine::Vllm => {
            push(&["vllm", "serve", &graph.model, "--host", place.listen, "--port", &port]);
            push(&["--served-model-name", graph.served_name()]);
            if is_spread {
                push(&["--tensor-parallel-size", &gpus]);
            }
            let config = json!({
                "enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv-events",
                "endpoint": format!("tcp://{bind}:{events}"), "replay_endpoint": format!("tcp://{bind}:{replay}"),
            });
            push(&["--enable-prompt-tokens-details", "--kv-events-config", &config.to_string()]);
            let half = match spec.role {
                Role::Prefill => Some("kv_producer"),
                Role::Decode => Some("kv_consumer"),
                Role::Both => None,
            };
            if let Some(half) = half {
                let config = json!({"kv_connector": "NixlConnector", "kv_role": half});
                push(&["--kv-transfer-config", &config.to_string()]);
                set("VLLM_NIXL_SIDE_CHANNEL_HOST", place.own.to_owned());
                set("VLLM_NIXL_SIDE_CHANNEL_PORT", (place.port + SIDE_CHANNEL).to_string());
            }
            if let Some(Node { rank, leader }) = place.node {
                push(&["--nnodes", &spec.nodes.to_string(), "--node-rank", rank, "--master-addr", leader]);
                if rank != "0" {
                    push(&["--headless"]);
                }
            }
        }
        Engine::Sglang => {
            push(&["python3", "-m", "sglang.launch_server", "--model-path", &graph.model]);
            push(&["--host", place.listen, "--port", &port, "--served-model-name", graph.served_name()]);
            if is_spread {
                push(&["--tp-size", &gpus]);
            }
            let config = json!({
                "publisher": "zmq", "topic": "kv-events",
                "endpoint": format!("tcp://{bind}:{events}"), "replay_endpoint": format!("tcp://{bind}:{replay}"),
            });
            push(&["--enable-metrics", "--enable-cache-report", "--kv-events-config", &config.to_string()]);
            if spec.role != Role::Both {
                let bootstrap = (place.port + BOOTSTRAP).to_string();
                push(&["--disaggregation-mode", spec.role.name()]);
                push(&["--disaggregation-bootstrap-port", &bootstrap]);
                push(&["--disaggregation-transfer-backend", "nixl"]);
            }
            if let Some(Node { rank, leader }) = place.node {
                let first = format!("{leader}:{}", place.port + SIDE_CHANNEL);
                push(&["--nnodes", &spec.nodes.to_string(), "--node-rank", rank, "--dist-init-addr", &first]);
            }
        }
        Engine::TensorrtLlm => {
            let mut options = json!({
                "kv_cache_config": {"enable_block_reuse": true, "event_buffer_max_size": 65_536},
                "return_perf_metrics": true,
            });
            if spec.role != Role::Both {
                options["cache_transceiver_config"] = json!({"backend": "DEFAULT"});
            }
            if spec.role == Role::Prefill {
                options["disable_overlap_scheduler"] = true.into();
            }
            set("KVASIR_TRTLLM_OPTIONS", options.to_string());
            // JSON is valid YAML.
            const SCRIPT: &str = "printf '%s' \"$KVASIR_TRTLLM_OPTIONS\" > /tmp/kvasir-options.yaml && exec \"$@\" \
                                  --extra_llm_api_options /tmp/kvasir-options.yaml";
            push(&["sh", "-c", SCRIPT, "trtllm-serve", "trtllm-serve", &graph.model, "--backend", "pytorch"]);
            push(&["--host", place.listen, "--port", &port]);
            if is_spread {
                push(&["--tp_size", &gpus]);
            }
        }
        Engine::Kvasir => {
            push(&["kvasir", "worker", "--role", spec.role.name()]);
            push(&["--listen", &format!("{}:{port}", place.listen)]);
        }
        Engine::Mock => {
            push(&["kvasir", "mock", "--role", spec.role.name(), "--events"]);
            push(&["--listen", &format!("{}:{port}", place.listen)]);
            if !graph.served_name().is_empty() {
                push(&["--model", graph.served_name()]);
            }
        }
    }
    command.extend(graph.arguments.iter().chain(&spec.arguments).cloned());
    Program { command, environment }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{from_toml, tests::DISAGGREGATED};

    fn place(node: Option<Node<'_>>) -> WorkerAddress<'_> {
        WorkerAddress { listen: "0.0.0.0", own: "10.0.0.1", port: 8000, node }
    }

    fn line(graph: &Graph, role: usize, node: Option<Node<'_>>) -> String {
        program(graph, &graph.role[role], &place(node)).command.join(" ")
    }

    #[test]
    fn vllm_hands_off_by_nixl_and_tells_its_events() {
        let graph = from_toml(DISAGGREGATED).expect("a description");
        let prefill = program(&graph, &graph.role[0], &place(None));
        let line = prefill.command.join(" ");
        assert!(
            line.starts_with("vllm serve Qwen/Qwen3-32B --host 0.0.0.0 --port 8000 --served-model-name"),
            "{line}"
        );
        for part in [
            "--tensor-parallel-size 2",
            "\"kv_role\":\"kv_producer\"",
            "\"endpoint\":\"tcp://*:9000\"",
            "\"replay_endpoint\":\"tcp://*:10000\"",
            "--max-model-len 32768",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
        let variable = |name: &str| prefill.environment.get(name).map(String::as_str);
        assert_eq!(variable("VLLM_NIXL_SIDE_CHANNEL_HOST"), Some("10.0.0.1"));
        assert_eq!(variable("VLLM_NIXL_SIDE_CHANNEL_PORT"), Some("11000"));
        assert_eq!(variable("VLLM_LOGGING_LEVEL"), Some("WARNING"));
        let decode = super::program(&graph, &graph.role[1], &place(None)).command.join(" ");
        assert!(decode.contains("kv_consumer") && decode.ends_with("--max-num-seqs 512"), "{decode}");
    }

    #[test]
    fn parallelism_that_is_said_is_not_said_again() {
        for own in ["\"-tp\", \"1\", \"-dp\", \"4\"", "\"--data-parallel-size=4\""] {
            let text = format!(
                "name = \"a\"\nmodel = \"m\"\nengine = \"vllm\"\n[[role]]\nrole = \"both\"\ngpus = 4\narguments = [{own}]\n"
            );
            let line = line(&from_toml(&text).expect("a description"), 0, None);
            assert!(!line.contains("--tensor-parallel-size") && !line.contains("kv-transfer"), "{line}");
        }
    }

    #[test]
    fn a_worker_of_several_machines_has_a_leader() {
        let text = |engine: &str| {
            format!(
                "name = \"a\"\nmodel = \"m\"\nengine = \"{engine}\"\n[[role]]\nrole = \"both\"\ngpus = 8\nnodes = 2\n"
            )
        };
        let node = |rank| Some(Node { rank, leader: "leader" });
        let vllm = from_toml(&text("vllm")).expect("a description");
        let first = line(&vllm, 0, node("0"));
        assert!(
            first.contains("--tensor-parallel-size 16") && first.contains("--nnodes 2 --node-rank 0"),
            "{first}"
        );
        assert!(!first.contains("--headless") && line(&vllm, 0, node("1")).contains("--headless"));
        let sglang = from_toml(&text("sglang")).expect("a description");
        let second = line(&sglang, 0, node("1"));
        assert!(
            second.contains("--dist-init-addr leader:11000") && second.contains("--tp-size 16"),
            "{second}"
        );
        assert!(from_toml(&text("tensorrt-llm")).expect_err("one machine").contains("nodes"));
    }

    #[test]
    fn every_engine_has_a_command_and_an_image() {
        for engine in ["vllm", "sglang", "tensorrt-llm", "kvasir", "mock"] {
            let text = format!(
                "name = \"a\"\nmodel = \"m\"\nengine = \"{engine}\"\n[[role]]\nrole = \"prefill\"\n[[role]]\nrole = \"decode\"\n"
            );
            let graph = from_toml(&text).expect(engine);
            for role in [0, 1] {
                let line = line(&graph, role, None);
                assert!(line.contains("8000"), "{line}");
            }
            let has_image = !matches!(graph.engine, Engine::Sglang | Engine::TensorrtLlm);
            assert_eq!(graph.check_version().is_ok(), has_image, "{engine}");
            let mut latest = graph.clone();
            for (image, is_version) in
                [("r:5000/e", false), ("e:latest", false), ("r:5000/e:1", true), ("e@sha256:0", true)]
            {
                latest.image = image.to_owned();
                assert_eq!(latest.check_version().is_ok(), is_version, "{image}");
            }
        }
    }
}
