//! A shell script that runs a graph on one machine until it is stopped.

use std::fmt::Write;

use crate::engine::Program;
use crate::graph::Graph;
use crate::machine::workers;
use crate::settings::{self, Workers};
use crate::unused::{comment, unused};
use crate::{File, Rendered};

/// Quotes a word so that a shell takes it literally.
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=,@%+".contains(&byte);
    match !word.is_empty() && word.bytes().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Returns the lines that start a background process and record its process id.
fn start(program: &Program) -> String {
    let mut words: Vec<String> =
        program.environment.iter().map(|(name, value)| format!("{name}={}", quoted(value))).collect();
    let mut command = program.command.iter().map(String::as_str);
    words.push(match command.next() {
        Some("kvasir") => "\"$kvasir\"".to_owned(),
        first => quoted(first.unwrap_or_default()),
    });
    words.extend(command.map(quoted));
    format!("{} &\npids=\"$pids $!\"\n", words.join(" "))
}

pub(crate) fn render(graph: &Graph) -> Result<Rendered, String> {
    let workers = workers(graph)?;
    let urls = workers.iter().map(|worker| worker.url()).collect();
    let listen = format!("127.0.0.1:{}", graph.gateway.port);
    let settings = settings::gateway(graph, &listen, None, &Workers::Urls(urls), &[])?;
    let unused = unused(graph, &[]);
    let mut text = String::from("#!/bin/sh\n");
    // Writing to a String cannot fail.
    let _written = writeln!(
        text,
        "# {} on this machine, until Ctrl-C. KVASIR is the binary, if it is not in PATH.\n{}set -eu\n\
         kvasir=${{KVASIR:-kvasir}}\nfolder=$(mktemp -d)\npids=\n\
         trap 'trap - EXIT; kill $pids 2>/dev/null || true; wait; rm -rf \"$folder\"' EXIT\n\
         trap 'exit 130' INT\ntrap 'exit 143' TERM\n\
         printf %s {} >\"$folder/kvasir.toml\"",
        graph.name,
        comment("Without a meaning here:", &unused),
        quoted(&settings)
    );
    for worker in &workers {
        text.push_str(&start(&worker.program(graph)));
    }
    text.push_str("\"$kvasir\" gateway --config \"$folder/kvasir.toml\" &\npids=\"$pids $!\"\n");
    let _written = writeln!(
        text,
        "echo \"http://{listen}/v1 serves {}\"\nwait",
        graph.served_name().replace(['"', '$', '`', '\\'], "")
    );
    let needs = vec!["`kvasir` and the engine in PATH".to_owned()];
    Ok(Rendered { files: vec![File { name: format!("{}.sh", graph.name), text }], needs, unused })
}
