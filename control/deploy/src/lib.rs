//! Deployment: renders one short description of a serving graph for its target. No I/O.
//!
//! ```text
//! graph.toml ─────────────▶ Graph ──▶ programs ──▶ kubernetes   Deployments, StatefulSets, LeaderWorkerSets or a PodCliqueSet
//! DynamoGraphDeployment ──▶   │      (commands,    compose      a Compose file
//!                             │       addresses)   systemd      units
//!                             └──▶ kvasir.toml     script       processes of one machine
//!                                                  helm         the manifests as a chart
//! ```
//!
//! Reading order: `graph` (the description and its checks), `dynamo` (NVIDIA Dynamo's description, field by
//! field), `engine` (an engine's command line), `settings` (`kvasir.toml` of the gateway and the control
//! service), `machine` (workers of one machine: ports and devices), then the targets: `kubernetes`, `helm`,
//! `compose`, `systemd`, `script`; `monitoring` (dashboard and alerts), `custom_resource` (the description as
//! a Kubernetes object).
//!
//! Invariant: `kvasir.toml` of every target is parsed by `control_config` before it is returned, so that a
//! description with invalid settings is refused here, and not by a gateway that does not start.

#![forbid(unsafe_code)]

mod compose;
pub mod custom_resource;
mod dynamo;
mod engine;
mod graph;
mod helm;
mod kubernetes;
mod machine;
mod monitoring;
mod script;
mod settings;
mod systemd;
mod unused;
mod yaml;

pub use dynamo::{Note, from_dynamo, is_dynamo};
pub use graph::{Engine, Gateway, Graph, Level, Role, RoleSpec, Storage, from_toml, from_yaml};
pub use kubernetes::Workload;
pub use monitoring::{Kind, Metric, metrics, monitoring};

/// A rendered file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Name of the file within its folder.
    pub name: String,
    /// Text of the file.
    pub text: String,
}

/// Result of rendering a graph.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rendered {
    /// The files.
    pub files: Vec<File>,
    /// Prerequisites: objects, files and commands.
    pub needs: Vec<String>,
    /// Fields of the description that have no meaning for the target.
    pub unused: Vec<String>,
}

/// Target of a rendering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Plain manifests.
    Kubernetes(Workload),
    /// The same manifests as a chart, with values for the parts that change from release to release.
    Helm(Workload),
    /// A Compose file.
    Compose,
    /// Units of one machine.
    Systemd,
    /// A shell script that runs everything on one machine until it is stopped.
    Processes,
    /// The description itself.
    Description,
}

/// Renders a graph; an error names the part that the target cannot run, or the fault in the settings.
pub fn render(graph: &Graph, target: Target) -> Result<Rendered, String> {
    match target {
        Target::Kubernetes(workload) => kubernetes::render(graph, workload),
        Target::Helm(workload) => helm::render(graph, workload),
        Target::Compose => compose::render(graph),
        Target::Systemd => systemd::render(graph),
        Target::Processes => script::render(graph),
        Target::Description => {
            let text = toml::to_string(graph).map_err(|error| error.to_string())?;
            let files = vec![File { name: format!("{}.toml", graph.name), text }];
            Ok(Rendered { files, ..Rendered::default() })
        }
    }
}
