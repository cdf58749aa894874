//! Units of one machine: a target, a service for the gateway and one for each worker.
//!
//! Source: `systemd.service(5)`, "Command lines", and `systemd.syntax(7)`, "Quoting".

use std::fmt::Write;

use crate::File;
use crate::engine::Program;
use crate::graph::Graph;
use crate::machine::{fixed_counts, workers};
use crate::settings::{self, Workers};

/// Where the rendered `kvasir.toml` and files of secrets are on the machine.
fn folder(graph: &Graph) -> String {
    format!("/etc/kvasir/{}", graph.name)
}

/// A word of a command line, or of an assignment: specifiers, variables and quotes mean themselves.
fn quoted(word: &str) -> String {
    let mut text = String::from("\"");
    for letter in word.chars() {
        match letter {
            '"' | '\\' => text.extend(['\\', letter]),
            '%' => text.push_str("%%"),
            _ => text.push(letter),
        }
    }
    text.push('"');
    text
}

fn service(graph: &Graph, what: &str, program: &Program) -> String {
    // `env` looks the program up in the unit's PATH, which may be that of a virtual environment.
    let words = ["/usr/bin/env"].into_iter().chain(program.command.iter().map(String::as_str));
    let command: Vec<String> = words.map(|word| quoted(word).replace('$', "$$")).collect();
    let mut text =
        format!("[Unit]\nDescription=Kvasir {}: {what}\nPartOf={}.target\n", graph.name, graph.name);
    text.push_str("After=network-online.target\nWants=network-online.target\n\n[Service]\n");
    for (name, value) in &program.environment {
        // A String takes everything that is written to it.
        let _written = writeln!(text, "Environment={}", quoted(&format!("{name}={value}")));
    }
    for secret in &graph.secrets {
        let _written = writeln!(text, "EnvironmentFile=-{}/{secret}.env", folder(graph));
    }
    let _written = writeln!(text, "ExecStart={}", command.join(" "));
    text.push_str(
        "Restart=on-failure\nRestartSec=2\nKillMode=mixed\nTimeoutStopSec=600\nLimitMEMLOCK=infinity\n",
    );
    let _written = writeln!(text, "\n[Install]\nWantedBy={}.target", graph.name);
    text
}

pub(crate) fn render(graph: &Graph) -> Result<Vec<File>, String> {
    if graph.gateway.replicas > 1 {
        return Err("gateway: replicas is more than 1, and there is one machine here".to_owned());
    }
    let workers = workers(graph)?;
    let urls = workers.iter().map(|worker| worker.url()).collect();
    let listen = format!("0.0.0.0:{}", graph.gateway.port);
    let settings = settings::gateway(graph, &listen, None, &Workers::Urls(urls), &[])?;
    let file = |name: String, text: String| File { name, text };
    let unit = |part: &str, what: &str, program: &Program| {
        file(format!("{}-{part}.service", graph.name), service(graph, what, program))
    };
    let settings_path = format!("{}/kvasir.toml", folder(graph));
    let command = ["kvasir", "gateway", "--config", &settings_path].map(str::to_owned).to_vec();
    let gateway = Program { command, environment: std::collections::BTreeMap::new() };
    let mut files = vec![
        file("kvasir.toml".to_owned(), format!("{}{settings}", fixed_counts(graph))),
        file(
            format!("{}.target", graph.name),
            format!("[Unit]\nDescription=Kvasir {}\n\n[Install]\nWantedBy=multi-user.target\n", graph.name),
        ),
        unit("gateway", "gateway", &gateway),
    ];
    files.extend(workers.iter().map(|worker| unit(&worker.name, &worker.name, &worker.program(graph))));
    Ok(files)
}
