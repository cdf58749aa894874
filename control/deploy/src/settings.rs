//! `kvasir.toml` of the gateways and of the control service.

use serde_json::{Map, Value, json};

use crate::engine::{EVENTS, REPLAY};
use crate::graph::{Engine, Graph, Role};

/// Keys that are derived from the description and must match the rendered objects.
const DERIVED: [&str; 17] = [
    "gateway.listen",
    "gateway.admin_listen",
    "gateway.peers",
    "gateway.workers",
    "gateway.prefill_workers",
    "gateway.decode_workers",
    "discovery.selector",
    "discovery.prefill_selector",
    "discovery.decode_selector",
    "discovery.port",
    "planner.actuator",
    "planner.prefill_target",
    "planner.decode_target",
    "control.gateways",
    "control.listen",
    "control.leader",
    "control.lease",
];

/// Sections of the control service.
const OF_CONTROL: [&str; 2] = ["planner", "control"];

/// Source of workers for gateways.
pub(crate) enum Workers<'a> {
    /// Pods of this selector, which listen on this port.
    Pods { selector: &'a str, port: u16 },
    /// URLs by role.
    Urls(Vec<(Role, String)>),
}

/// Returns the gateway's file: derived settings, overridden by the description's own settings.
pub(crate) fn gateway(
    graph: &Graph,
    listen: &str,
    admin: Option<&str>,
    workers: &Workers<'_>,
    peers: &[String],
) -> Result<String, String> {
    let engine = match graph.engine {
        Engine::Vllm | Engine::Mock => "vllm",
        Engine::Sglang => "sglang",
        Engine::TensorrtLlm => "tensorrt-llm",
        Engine::Kvasir => "native",
    };
    let mut gateway = json!({"listen": listen, "engine": engine});
    match graph.engine {
        Engine::Vllm | Engine::Sglang => {
            gateway["kv_events"] = format!("tcp://*:+{EVENTS}").into();
            gateway["kv_replay"] = format!("tcp://*:+{REPLAY}").into();
        }
        // TensorRT-LLM returns each event once, so only one gateway may poll.
        Engine::TensorrtLlm if graph.gateway.replicas == 1 => gateway["kv_events"] = "poll".into(),
        _ => {}
    }
    if let Some(admin) = admin {
        gateway["admin_listen"] = admin.into();
    }
    if !peers.is_empty() {
        gateway["peers"] = json!(peers);
    }
    let mut all = json!({"gateway": gateway, "drain": {"unready_for": "5s"}});
    match workers {
        Workers::Pods { selector, port } => all["discovery"] = json!({"selector": selector, "port": port}),
        Workers::Urls(urls) => {
            for (role, key) in [
                (Role::Both, "workers"),
                (Role::Prefill, "prefill_workers"),
                (Role::Decode, "decode_workers"),
            ] {
                let urls: Vec<&String> =
                    urls.iter().filter(|(of, _)| *of == role).map(|(_, url)| url).collect();
                if !urls.is_empty() {
                    all["gateway"][key] = json!(urls);
                }
            }
        }
    }
    merge_settings(graph, &mut all, false)?;
    checked(&all)
}

/// Overrides derived settings with the description's own: those of the control service, or all others.
fn merge_settings(graph: &Graph, all: &mut Value, is_control: bool) -> Result<(), String> {
    for (section, values) in &graph.gateway.settings {
        for key in values.as_object().into_iter().flat_map(Map::keys) {
            let name = format!("{section}.{key}");
            if DERIVED.contains(&name.as_str()) {
                return Err(format!("gateway.settings: {name} is derived from the description; remove it"));
            }
        }
    }
    let own =
        graph.gateway.settings.iter().filter(|(name, _)| OF_CONTROL.contains(&name.as_str()) == is_control);
    let own: Map<String, Value> = own.map(|(name, values)| (name.clone(), values.clone())).collect();
    if let Some(all) = all.as_object_mut() {
        merge(all, &own);
    }
    Ok(())
}

/// Returns the control service's file.
pub(crate) fn control(graph: &Graph, targets: &[(Role, String)], gateways: &str) -> Result<String, String> {
    // The planner has a single number of GPUs for all workers.
    let mut gpus = graph.role.iter().map(|spec| graph.gpus(spec) * spec.nodes);
    let per_worker = gpus.next().unwrap_or(0);
    if gpus.any(|other| other != per_worker) {
        return Err("role: the planner counts the same GPUs for workers of both roles; with other numbers leave `max` out"
            .to_owned());
    }
    let mut planner = json!({
        "mode": "act", "ttft": graph.level.ttft, "itl": graph.level.itl, "attainment": graph.level.attainment,
        "gpus_max": graph.gpus_max().max(1), "gpus": per_worker, "actuator": "kubernetes",
    });
    for spec in &graph.role {
        let (min, max) = match spec.role {
            Role::Prefill => ("prefill_min", "prefill_max"),
            Role::Decode | Role::Both => ("decode_min", "decode_max"),
        };
        // A role without its own maximum keeps its number of workers.
        planner[min] = spec.count().into();
        planner[max] = spec.most().into();
    }
    for (role, target) in targets {
        let key = if *role == Role::Prefill { "prefill_target" } else { "decode_target" };
        planner[key] = target.as_str().into();
    }
    let control = json!({
        "gateways": [gateways], "listen": "0.0.0.0:8090", "leader": "lease", "lease": format!("{}-control", graph.name),
    });
    let mut all = json!({"planner": planner, "control": control});
    merge_settings(graph, &mut all, true)?;
    checked(&all)
}

/// Returns the ports that these settings open in addition to the API's: name and number.
pub(crate) fn more_ports(settings: &str) -> Result<Vec<(&'static str, u16)>, String> {
    let read = control_config::parse(settings).map_err(|_| "gateway.settings cannot be read".to_owned())?;
    let port = |listen: &str| listen.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let ports = [
        ("grpc", port(&read.gateway.grpc_listen)),
        ("picker", port(&read.picker.listen)),
        ("picker-health", port(&read.picker.health_listen)),
    ];
    Ok(ports.into_iter().filter_map(|(name, port)| Some((name, port?))).collect())
}

fn merge(own: &mut Map<String, Value>, given: &Map<String, Value>) {
    for (name, value) in given {
        match (own.get_mut(name), value) {
            (Some(Value::Object(own)), Value::Object(given)) => merge(own, given),
            _ => drop(own.insert(name.clone(), value.clone())),
        }
    }
}

/// Formats the settings as TOML that Kvasir accepts.
fn checked(settings: &Value) -> Result<String, String> {
    let text = toml::to_string(settings).map_err(|error| format!("gateway.settings: {error}"))?;
    match control_config::parse(&text) {
        Ok(_) => Ok(text),
        // Line numbers would refer to the generated text.
        Err(problems) => {
            let said: Vec<String> = problems
                .into_iter()
                .map(|problem| format!("gateway.settings: {}", problem.message))
                .collect();
            Err(said.join("\n"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{from_toml, tests::DISAGGREGATED};

    #[test]
    fn own_settings_count_before_those_that_are_made() {
        let text = format!(
            "{DISAGGREGATED}\n[gateway.settings.gateway]\nretries = 1\nkv_replay = \"\"\n[gateway.settings.router]\ntemperature = 0.5\n"
        );
        let text = text.replace("gateway = { replicas = 2 }\n", "");
        let graph = from_toml(&text).expect("a description");
        let workers = Workers::Pods { selector: "kvasir/graph=qwen", port: 8000 };
        let settings = gateway(&graph, "0.0.0.0:8000", None, &workers, &[]).expect("settings");
        let read = control_config::parse(&settings).expect("they are read back");
        assert_eq!((read.gateway.retries, read.gateway.kv_replay.as_str()), (1, ""));
        assert_eq!(
            (read.gateway.engine.as_str(), read.gateway.kv_events.as_str()),
            ("vllm", "tcp://*:+1000")
        );
        assert_eq!(read.discovery.selector, "kvasir/graph=qwen");
        let wrong = text.replace("temperature", "temprature");
        let said = gateway(&from_toml(&wrong).expect("a description"), "0.0.0.0:8000", None, &workers, &[]);
        let said = said.expect_err("an unknown key");
        assert!(said.contains("gateway.settings") && said.contains("temprature"), "{said}");
    }

    #[test]
    fn the_planner_keeps_the_level_and_the_limits() {
        let graph = from_toml(&DISAGGREGATED.replace("gpus = 4", "gpus = 2")).expect("a description");
        let targets = [(Role::Prefill, "Deployment/p".to_owned()), (Role::Decode, "Deployment/d".to_owned())];
        let settings = control(&graph, &targets, "g:8000").expect("settings");
        let planner = control_config::parse(&settings).expect("they are read back").planner;
        assert_eq!((planner.prefill_min, planner.prefill_max, planner.decode_max), (1, 4, 8));
        assert_eq!(
            (planner.gpus, planner.gpus_max, planner.prefill_target.as_str()),
            (2, 24, "Deployment/p")
        );
        assert_eq!(planner.ttft, std::time::Duration::from_secs(2));
        let uneven = from_toml(DISAGGREGATED).expect("a description");
        assert!(control(&uneven, &targets, "g").expect_err("other numbers").contains("same GPUs"));
        // The planner's settings go to the control service, and derived settings stay.
        let text = format!(
            "{}\n[gateway.settings.planner]\nstart_time = \"9min\"\n",
            DISAGGREGATED.replace("gpus = 4", "gpus = 2")
        );
        let text = text.replace("gateway = { replicas = 2 }\n", "");
        let read = |settings: &str| control_config::parse(settings).expect("they are read back");
        let own = from_toml(&text).expect("a description");
        let told = read(&control(&own, &targets, "g:8000").expect("settings"));
        assert_eq!(told.planner.start_time, std::time::Duration::from_secs(540));
        let workers = Workers::Pods { selector: "a=b", port: 8000 };
        let told = read(&gateway(&own, "0.0.0.0:8000", None, &workers, &[]).expect("settings"));
        assert_ne!(told.planner.start_time, std::time::Duration::from_secs(540));
        for key in ["gateway.listen = \"0.0.0.0:7777\"", "planner.actuator = \"keda\"", "discovery.port = 1"]
        {
            let (section, rest) = key.split_once('.').expect("a key");
            let text = DISAGGREGATED.replace("gateway = { replicas = 2 }\n", "");
            let graph =
                from_toml(&format!("{text}\n[gateway.settings.{section}]\n{rest}\n")).expect("a description");
            let said = gateway(&graph, "0.0.0.0:8000", None, &workers, &[]).expect_err(key);
            assert!(said.contains("is derived from the description"), "{said}");
        }
    }
}
