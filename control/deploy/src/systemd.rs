//! systemd units of one machine: a target, a service for the gateway and one for each worker.
//!
//! Source: `systemd.service(5)`, "Command lines", and `systemd.syntax(7)`, "Quoting".

use std::fmt::Write;

use crate::engine::Program;
use crate::graph::Graph;
use crate::machine::workers;
use crate::settings::{self, Workers};
use crate::unused::{comment, unused};
use crate::{File, Rendered};

/// Returns the folder on the machine that holds the rendered `kvasir.toml` and the files of secrets.
fn folder(graph: &Graph) -> String {
    format!("/etc/kvasir/{}", graph.name)
}

/// Quotes a word of a command line or of an assignment, so that specifiers, variables and quotes stay
/// literal.
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

fn service(graph: &Graph, what: &str, program: &Program, secrets: &[String]) -> String {
    // `env` searches for the program in the unit's PATH, which may be that of a virtual environment.
    let words = ["/usr/bin/env"].into_iter().chain(program.command.iter().map(String::as_str));
    let command: Vec<String> = words.map(|word| quoted(word).replace('$', "$$")).collect();
    let mut text =
        format!("[Unit]\nDescription=Kvasir {}: {what}\nPartOf={}.target\n", graph.name, graph.name);
    text.push_str("After=network-online.target\nWants=network-online.target\n\n[Service]\n");
    for (name, value) in &program.environment {
        // Writing to a String cannot fail.
        let _written = writeln!(text, "Environment={}", quoted(&format!("{name}={value}")));
    }
    for secret in secrets {
        let _written = writeln!(text, "EnvironmentFile=-{}/{secret}.env", folder(graph));
    }
    let _written = writeln!(text, "ExecStart={}", command.join(" "));
    text.push_str(
        "Restart=on-failure\nRestartSec=2\nKillMode=mixed\nTimeoutStopSec=600\nLimitMEMLOCK=infinity\n",
    );
    let _written = writeln!(text, "\n[Install]\nWantedBy={}.target", graph.name);
    text
}

pub(crate) fn render(graph: &Graph) -> Result<Rendered, String> {
    let workers = workers(graph)?;
    let urls = workers.iter().map(|worker| worker.url()).collect();
    let listen = format!("0.0.0.0:{}", graph.gateway.port);
    let settings = settings::gateway(graph, &listen, None, &Workers::Urls(urls), &[])?;
    let file = |name: String, text: String| File { name, text };
    let unit = |part: &str, program: &Program, secrets: &[String]| {
        file(format!("{}-{part}.service", graph.name), service(graph, part, program, secrets))
    };
    let settings_path = format!("{}/kvasir.toml", folder(graph));
    let command = ["kvasir", "gateway", "--config", &settings_path].map(str::to_owned).to_vec();
    let gateway = Program { command, environment: std::collections::BTreeMap::new() };
    let mut services = vec![unit("gateway", &gateway, &[])];
    services.extend(workers.iter().map(|worker| unit(&worker.name, &worker.program(graph), &graph.secrets)));
    let wanted: Vec<&str> = services.iter().map(|unit| unit.name.as_str()).collect();
    let name = &graph.name;
    let mut needs = vec![
        format!("kvasir.toml in {}, and the other files in /etc/systemd/system", folder(graph)),
        format!("systemctl daemon-reload && systemctl enable --now {name}.target"),
        "`kvasir` and the engine in the units' PATH; units run as root unless `systemctl edit` gives them a `User=`".to_owned(),
    ];
    let variables = graph.secrets.iter();
    needs.extend(
        variables.map(|secret| format!("{}/{secret}.env, with variables of the engines", folder(graph))),
    );
    let unused = unused(graph, &["secrets"]);
    let head = comment("What must be done:", &needs) + &comment("Without a meaning here:", &unused);
    let target = format!(
        "{head}[Unit]\nDescription=Kvasir {name}\nWants={}\n\n[Install]\nWantedBy=multi-user.target\n",
        wanted.join(" ")
    );
    let mut files = vec![file("kvasir.toml".to_owned(), settings), file(format!("{name}.target"), target)];
    files.extend(services);
    Ok(Rendered { files, needs, unused })
}
