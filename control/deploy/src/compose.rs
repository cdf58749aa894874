//! A Compose file in which each worker is a service with its own devices.
//!
//! Source: the Compose Specification, `05-services.md`, `08-configs.md`, `deploy.md` (`devices`).

use serde_json::{Map, Value, json};

use crate::engine::{self, WorkerAddress};
use crate::graph::Graph;
use crate::machine::workers;
use crate::settings::{self, Workers};
use crate::unused::{comment, unused};
use crate::{File, Rendered, yaml};

const PORT: u16 = 8000;
const STOP_WITHIN: &str = "10m";

/// Escapes `$`, which Compose would replace with a variable.
fn literal(text: &str) -> String {
    text.replace('$', "$$")
}

pub(crate) fn render(graph: &Graph) -> Result<Rendered, String> {
    graph.check_version()?;
    let port = graph.gateway.port;
    let workers = workers(graph)?;
    let urls = workers.iter().map(|worker| (worker.spec.role, format!("http://{}:{PORT}", worker.name)));
    let listen = format!("0.0.0.0:{port}");
    let settings = settings::gateway(graph, &listen, None, &Workers::Urls(urls.collect()), &[])?;
    let mut services = Map::new();
    services.insert(
        "gateway".to_owned(),
        json!({
            "image": graph.gateway.image, "entrypoint": ["kvasir", "gateway", "--config", "/etc/kvasir/kvasir.toml"],
            "configs": [{"source": "kvasir", "target": "/etc/kvasir/kvasir.toml"}],
            "ports": [format!("{port}:{port}")], "restart": "unless-stopped", "stop_grace_period": STOP_WITHIN,
        }),
    );
    let mut volumes = Map::new();
    for worker in &workers {
        let place = WorkerAddress { listen: "0.0.0.0", own: &worker.name, port: PORT, node: None };
        let program = engine::program(graph, worker.spec, &place);
        let command: Vec<String> = program.command.iter().map(|word| literal(word)).collect();
        let environment: Map<String, Value> =
            program.environment.iter().map(|(name, value)| (name.clone(), literal(value).into())).collect();
        let mut service = json!({
            "image": graph.worker_image(), "entrypoint": command, "environment": environment,
            "shm_size": "16gb", "ulimits": {"memlock": -1}, "restart": "unless-stopped",
            "stop_grace_period": STOP_WITHIN,
        });
        if !worker.devices.is_empty() {
            let ids: Vec<&str> = worker.devices.split(',').collect();
            let device = json!({"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]});
            service["deploy"] = json!({"resources": {"reservations": {"devices": [device]}}});
        }
        let mounts: Vec<Value> = graph
            .storage
            .iter()
            .map(|storage| {
                let (kind, source) = match storage.claim.is_empty() {
                    true => ("bind", &storage.folder),
                    false => ("volume", &storage.claim),
                };
                if !storage.claim.is_empty() {
                    volumes.insert(storage.claim.clone(), json!({}));
                }
                json!({"type": kind, "source": literal(source), "target": literal(&storage.path)})
            })
            .collect();
        if !mounts.is_empty() {
            service["volumes"] = mounts.into();
        }
        if !graph.secrets.is_empty() {
            let files = graph
                .secrets
                .iter()
                .map(|secret| json!({"path": format!("{secret}.env"), "required": false}));
            service["env_file"] = files.collect();
        }
        services.insert(worker.name.clone(), service);
    }
    let mut file = json!({"name": graph.name, "services": services});
    if !volumes.is_empty() {
        file["volumes"] = volumes.into();
    }
    file["configs"] = json!({"kvasir": {"content": literal(&settings)}});
    let mut needs = vec![format!("the image {} (control/deploy/image/Dockerfile)", graph.gateway.image)];
    let variables = graph.secrets.iter();
    needs.extend(
        variables.map(|secret| format!("a file {secret}.env beside it, with variables of the engines")),
    );
    let unused = unused(graph, &["secrets", "storage", "image", "gateway.image"]);
    let text = comment("What must be there:", &needs)
        + &comment("Without a meaning here:", &unused)
        + &yaml::document(&file)?;
    Ok(Rendered { files: vec![File { name: "compose.yaml".to_owned(), text }], needs, unused })
}
