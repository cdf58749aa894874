//! `kvasir deploy`: renders one description of a serving graph for its target.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use control_deploy::{
    File, Graph, Level, Target, Workload, from_dynamo, from_toml, from_yaml, is_dynamo, metrics, monitoring,
    render,
};

use crate::process;

#[derive(Subcommand)]
pub(crate) enum DeployCommand {
    /// Render a description of a graph as manifests, a Compose file, units or a script.
    Render(RenderArgs),
    /// Render the custom resource `KvasirGraph`, and a control service that reconciles its objects, as
    /// manifests for one namespace.
    Operator {
        /// Image of Kvasir.
        #[arg(long, default_value = concat!("kvasir:", env!("CARGO_PKG_VERSION")))]
        image: String,
    },
    /// Render a Grafana dashboard and Prometheus rules for the gateway's metrics.
    Monitoring(MonitoringArgs),
}

#[derive(Args)]
pub(crate) struct MonitoringArgs {
    /// Configuration file whose service level the alerts use. Without a file, the defaults apply.
    #[arg(long, env = "KVASIR_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Folder for `dashboard.json` and `rules.yaml`, which is created. Without it they are printed.
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct RenderArgs {
    /// Description of the graph: TOML, the same in YAML, or a DynamoGraphDeployment. `-` reads standard
    /// input.
    file: PathBuf,
    /// Target of the rendering.
    #[arg(long, value_enum, default_value = "kubernetes")]
    to: TargetName,
    /// Kind of Kubernetes objects for the workers.
    #[arg(long, value_enum, default_value = "auto")]
    workload: WorkloadName,
    /// Folder for the files, which is created. Without it they are printed.
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq)]
enum TargetName {
    /// Kubernetes manifests.
    Kubernetes,
    /// The same manifests as a Helm chart.
    Helm,
    /// A Compose file for one machine.
    Compose,
    /// systemd units for one machine.
    Systemd,
    /// A shell script that runs everything on one machine until it is stopped.
    Processes,
    /// The description itself, in TOML: the values taken from a DynamoGraphDeployment.
    Description,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq)]
enum WorkloadName {
    /// Deployments; LeaderWorkerSets for workers that span several machines.
    Auto,
    /// StatefulSets; LeaderWorkerSets for workers that span several machines.
    StatefulSet,
    /// LeaderWorkerSets for all workers.
    LeaderWorkerSet,
    /// One PodCliqueSet of Grove.
    PodCliqueSet,
}

pub(crate) fn run(command: &DeployCommand) -> Result<ExitCode> {
    let arguments = match command {
        DeployCommand::Render(arguments) => arguments,
        DeployCommand::Monitoring(arguments) => return show_monitoring(arguments),
        DeployCommand::Operator { image } => {
            print!("{}", control_deploy::custom_resource::operator(image).map_err(anyhow::Error::msg)?);
            return Ok(ExitCode::SUCCESS);
        }
    };
    let graph = read(&arguments.file)?;
    // A converted description is printed even if it has problems.
    if arguments.to != TargetName::Description {
        graph.check().map_err(|error| problems(&arguments.file, &error))?;
    }
    if arguments.workload != WorkloadName::Auto
        && ![TargetName::Kubernetes, TargetName::Helm].contains(&arguments.to)
    {
        bail!("--workload is for --to kubernetes and --to helm");
    }
    let workload = match arguments.workload {
        WorkloadName::Auto => Workload::Auto,
        WorkloadName::StatefulSet => Workload::StatefulSet,
        WorkloadName::LeaderWorkerSet => Workload::LeaderWorkerSet,
        WorkloadName::PodCliqueSet => Workload::PodCliqueSet,
    };
    let target = match arguments.to {
        TargetName::Kubernetes => Target::Kubernetes(workload),
        TargetName::Helm => Target::Helm(workload),
        TargetName::Compose => Target::Compose,
        TargetName::Systemd => Target::Systemd,
        TargetName::Processes => Target::Processes,
        TargetName::Description => Target::Description,
    };
    let rendered = render(&graph, target).map_err(|error| problems(&arguments.file, &error))?;
    for field in &rendered.unused {
        eprintln!("unused {field}: it has no meaning for this target");
    }
    for need in &rendered.needs {
        eprintln!("needs  {need}");
    }
    write_or_print(arguments.output.as_deref(), &rendered.files)
}

fn show_monitoring(arguments: &MonitoringArgs) -> Result<ExitCode> {
    let settings = process::read(arguments.config.as_deref(), false)?;
    let text = |duration: std::time::Duration| format!("{}ms", duration.as_secs_f64() * 1e3);
    let planner = &settings.planner;
    let level = Level { ttft: text(planner.ttft), itl: text(planner.itl), attainment: planner.attainment };
    let files = monitoring(&metrics(router_gateway::METRICS), &level).map_err(anyhow::Error::msg)?;
    write_or_print(arguments.output.as_deref(), &files)
}

fn write_or_print(folder: Option<&Path>, files: &[File]) -> Result<ExitCode> {
    match folder {
        Some(folder) => write(folder, files)?,
        None => print(files)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats the problems of a description, one per line, each prefixed by the file name.
fn problems(file: &Path, error: &str) -> anyhow::Error {
    let lines: Vec<String> = error.lines().map(|line| format!("{}: {line}", file.display())).collect();
    anyhow::anyhow!("{}", lines.join("\n"))
}

fn read(file: &Path) -> Result<Graph> {
    let is_piped = file == Path::new("-");
    let text = match is_piped {
        true => std::io::read_to_string(std::io::stdin()).context("the standard input")?,
        false => std::fs::read_to_string(file).with_context(|| format!("{}", file.display()))?,
    };
    let ending = file.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let is_yaml = ["yaml", "yml", "json"].contains(&ending);
    if !is_yaml && !is_piped && ending != "toml" {
        bail!("{}: a description ends in .toml, .yaml, .yml or .json", file.display());
    }
    let of_file = |error: String| problems(file, &error);
    if (is_yaml || is_piped) && is_dynamo(&text) {
        let (graph, notes) = from_dynamo(&text).map_err(of_file)?;
        for note in notes {
            let outcome = if note.is_taken { "taken " } else { "left  " };
            eprintln!("{outcome} {}: {}", note.field, note.text);
        }
        if let Err(error) = graph.check() {
            eprintln!("The converted description (--to description) is invalid:");
            error.lines().for_each(|line| eprintln!("  {line}"));
        }
        return Ok(graph);
    }
    if is_yaml { from_yaml(&text) } else { from_toml(&text) }.map_err(of_file)
}

fn write(folder: &Path, files: &[File]) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
    for file in files {
        let path = folder.join(&file.name);
        if let Some(inner) = path.parent() {
            std::fs::create_dir_all(inner).with_context(|| format!("{}", inner.display()))?;
        }
        std::fs::write(&path, &file.text).with_context(|| format!("{}", path.display()))?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}

fn print(files: &[File]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for file in files {
        if files.len() > 1 {
            writeln!(out, "# ---- {}", file.name)?;
        }
        out.write_all(file.text.as_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns the names of metrics in an expression, without the suffixes of their samples.
    fn named(expression: &str) -> BTreeSet<&str> {
        let words = expression.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        let ours = words.filter(|word| word.starts_with("kvasir_") || word.starts_with("process_"));
        ours.map(|word| {
            ["_total", "_bucket", "_sum", "_count"]
                .iter()
                .find_map(|end| word.strip_suffix(end))
                .unwrap_or(word)
        })
        .collect()
    }

    #[test]
    fn every_metric_has_a_panel_and_every_expression_a_metric() {
        let known = metrics(router_gateway::METRICS);
        let names: BTreeSet<&str> = known.iter().map(|metric| metric.name.as_str()).collect();
        let files = monitoring(&known, &Level::default()).expect("files");
        let dashboard: serde_json::Value = serde_json::from_str(&files[0].text).expect("JSON");
        let mut shown = BTreeSet::new();
        for panel in dashboard["panels"].as_array().expect("panels") {
            for target in panel["targets"].as_array().into_iter().flatten() {
                shown.extend(named(target["expr"].as_str().expect("an expression")));
            }
        }
        assert_eq!(shown, names, "panels and METRICS.md");
        let alerts = named(&files[1].text);
        assert!(alerts.len() > 10 && alerts.is_subset(&names), "{:?}", alerts.difference(&names));
    }
}
