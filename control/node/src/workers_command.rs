//! `kvasir workers` and `kvasir drain`: change the roster of a running gateway over its administrators'
//! routes. They print the change and exit with 0, or print the gateway's own reason and exit with 1.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use http::Method;
use router_engines::client::{EngineClient, EngineError};
use serde_json::{Value, json};

use crate::credentials::Credentials;

/// Interval between two polls of a draining worker.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Time limit for the gateway's answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// The gateway to query.
#[derive(Args)]
pub(crate) struct GatewayArgs {
    /// The gateway, as HOST:PORT or https://HOST:PORT; use its `gateway.admin_listen` address if that is set.
    #[arg(long, global = true, default_value = "127.0.0.1:8000", value_name = "GATEWAY")]
    gateway: String,
    #[command(flatten)]
    credentials: Credentials,
}

/// Arguments of `kvasir workers`.
#[derive(Args)]
pub(crate) struct WorkersArgs {
    #[command(flatten)]
    gateway: GatewayArgs,
    /// Print the gateway's own JSON.
    #[arg(long)]
    json: bool,
    #[command(subcommand)]
    command: Option<WorkersCommand>,
}

#[derive(Subcommand)]
enum WorkersCommand {
    /// Show all workers, their states, and the reasons why workers are not ready (the default).
    List,
    /// Add a worker to the roster of this gateway and its peers, until all of these gateways have been
    /// stopped.
    Add {
        /// http://HOST:PORT
        url: String,
        /// Role of the worker: prefill, decode or both (default: as the engine reports).
        #[arg(long, default_value = "")]
        role: String,
        /// Pool that the worker belongs to.
        #[arg(long, default_value = router_fleet::DEFAULT_POOL)]
        pool: String,
    },
    /// Put a worker's engine to sleep when its requests have ended, which frees its GPU memory. Waits until
    /// it sleeps.
    Sleep {
        /// Name as `kvasir workers` shows it.
        name: String,
    },
    /// Wake a sleeping worker. Waits until it takes requests.
    Wake {
        /// Name as `kvasir workers` shows it.
        name: String,
    },
    /// Remove a worker, including one from the configuration. Its running requests continue.
    Remove {
        /// Name as `kvasir workers` shows it.
        name: String,
    },
}

/// Arguments of `kvasir drain`.
#[derive(Args)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    gateway: GatewayArgs,
    /// Name of the worker as `kvasir workers` shows it.
    name: String,
    /// Wait until the worker has no request of this gateway and its peers left.
    #[arg(long)]
    wait: bool,
    /// Most seconds to wait; the command fails after them.
    #[arg(long, default_value_t = 600, value_name = "SECONDS", requires = "wait")]
    timeout: u64,
    /// Undo a drain: the worker takes requests again.
    #[arg(long, conflicts_with = "wait")]
    undo: bool,
}

struct Admin(EngineClient);

impl Admin {
    fn new(arguments: &GatewayArgs) -> Result<Self> {
        Ok(Self(arguments.credentials.client(&arguments.gateway)?))
    }

    async fn get(&self, path: &str) -> Result<Value> {
        self.answer(self.0.ask(Method::GET, path, bytes::Bytes::new())).await
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        self.answer(self.0.ask(Method::POST, path, body.to_string().into())).await
    }

    /// Posts a request without the short time limit, for changes that take as long as a worker's requests.
    async fn post_long(&self, path: &str, body: &Value) -> Result<Value> {
        self.answer_within(
            router_fleet::SLEEP_REQUEST_MAX,
            self.0.ask(Method::POST, path, body.to_string().into()),
        )
        .await
    }

    async fn answer(&self, asked: impl Future<Output = Result<bytes::Bytes, EngineError>>) -> Result<Value> {
        self.answer_within(ANSWER_WITHIN, asked).await
    }

    async fn answer_within(
        &self,
        most: Duration,
        asked: impl Future<Output = Result<bytes::Bytes, EngineError>>,
    ) -> Result<Value> {
        let answer = tokio::time::timeout(most, asked).await;
        let answer = answer.with_context(|| format!("{}: no answer in time", self.0.base()))?;
        match answer {
            Ok(answer) => serde_json::from_slice(&answer).context("the gateway's answer is no JSON"),
            Err(EngineError::Refused(error)) => bail!("{}", error.message),
            Err(error) => bail!("{error}"),
        }
    }
}

/// Returns a path below a worker's route; the name may contain the brackets of an IPv6 address.
pub(crate) fn path_of(name: &str, rest: &str) -> String {
    format!("/kvasir/workers/{}{rest}", name.replace('[', "%5B").replace(']', "%5D"))
}

pub(crate) fn workers(arguments: &WorkersArgs) -> Result<ExitCode> {
    let admin = Admin::new(&arguments.gateway)?;
    run(async {
        match &arguments.command {
            None | Some(WorkersCommand::List) => {
                let told = admin.get("/kvasir/workers").await?;
                if arguments.json {
                    println!("{told}");
                } else {
                    print!("{}{}", table(&told), sources(&told["discovery"]));
                }
            }
            Some(WorkersCommand::Add { url, role, pool }) => {
                let worker = json!({ "url": url, "role": role, "pool": pool });
                let told = admin.post("/kvasir/workers", &worker).await?;
                println!("{url}: {}", if told["replaced"] == 1 { "replaced" } else { "added" });
            }
            Some(WorkersCommand::Sleep { name }) => {
                let told = admin.post_long(&path_of(name, "/sleep"), &Value::Null).await?;
                println!("{name}: sleeps; its engine took {:.1} s", told["seconds"].as_f64().unwrap_or(0.0));
            }
            Some(WorkersCommand::Wake { name }) => {
                let told = admin.post_long(&path_of(name, "/wake"), &Value::Null).await?;
                println!("{name}: takes requests after {:.1} s", told["seconds"].as_f64().unwrap_or(0.0));
            }
            Some(WorkersCommand::Remove { name }) => {
                admin.post(&path_of(name, "/remove"), &Value::Null).await?;
                println!("{name}: removed");
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

pub(crate) fn drain(arguments: &DrainArgs) -> Result<ExitCode> {
    let admin = Admin::new(&arguments.gateway)?;
    let name = &arguments.name;
    run(async {
        if arguments.undo {
            admin.post(&path_of(name, "/serve"), &Value::Null).await?;
            println!("{name}: serves again");
            return Ok(ExitCode::SUCCESS);
        }
        admin.post(&path_of(name, "/drain"), &Value::Null).await?;
        println!("{name}: draining");
        if !arguments.wait {
            return Ok(ExitCode::SUCCESS);
        }
        let began = Instant::now();
        let mut shown = None;
        loop {
            let worker = admin.get(&path_of(name, "")).await?;
            let count = |key: &str| worker[key].as_u64().unwrap_or(0);
            let left = count("requests") + count("peers_requests");
            if left == 0 {
                println!("{name}: drained after {:.1} s", began.elapsed().as_secs_f64());
                return Ok(ExitCode::SUCCESS);
            }
            if began.elapsed() >= Duration::from_secs(arguments.timeout) {
                bail!("{name}: {left} requests are left after {} s", arguments.timeout);
            }
            if shown.replace(left) != Some(left) {
                println!("{name}: {left} requests left");
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    })
}

fn run(command: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(command)
}

/// Formats the sources of discovery, one per line, and the omitted workers.
fn sources(discovery: &Value) -> String {
    let mut out = String::new();
    for source in discovery["sources"].as_array().into_iter().flatten() {
        let name = source["source"].as_str().unwrap_or_default();
        let suspect = match source["suspect"].as_u64() {
            None | Some(0) => String::new(),
            Some(count) => format!(", {count} of them missing from its last list"),
        };
        let error = source["error"].as_str().map(|error| format!("; cannot be read: {error}"));
        out.push_str(&format!(
            "{name}: {} workers{suspect}{}\n",
            source["workers"],
            error.unwrap_or_default()
        ));
    }
    for refused in discovery["refused"].as_array().into_iter().flatten() {
        out.push_str(&format!("left out: {}\n", refused.as_str().unwrap_or_default()));
    }
    out
}

/// Formats a table with columns as wide as their content.
fn table(told: &Value) -> String {
    let text = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let head = ["WORKER", "STATE", "POOL", "MODEL", "ENGINE", "ROLE", "REQUESTS", "REASON"];
    let keys = ["name", "state", "pool", "model", "engine", "role", "requests", "reason"];
    let mut rows = vec![head.map(str::to_owned)];
    for worker in told["workers"].as_array().into_iter().flatten() {
        rows.push(keys.map(|key| text(&worker[key])));
    }
    let widths: [usize; 8] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let mut out = String::new();
    for row in &rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        out.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_columns_as_wide_as_what_is_in_them() {
        let told = json!({ "workers": [
            { "name": "node:8000", "state": "ready", "pool": "gateway", "model": "m", "engine": "vllm", "role": "both",
              "requests": 12, "reason": "" },
            { "name": "n:1", "state": "down", "pool": "gateway", "model": "m", "engine": null, "role": null,
              "requests": 0, "reason": "it is away" },
        ]});
        let shown = table(&told);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[0].find("STATE"), lines[1].find("ready"));
        assert_eq!(lines[0].find("REASON"), lines[2].find("it is away"));
        assert!(lines[1].ends_with("12        -"), "{}", lines[1]);
    }

    #[test]
    fn sources_are_shown_with_what_is_wrong_with_them() {
        let discovery = json!({ "sources": [
            { "source": "file a.toml", "workers": 2, "suspect": 0, "error": null },
            { "source": "dns b:1", "workers": 3, "suspect": 3, "error": "no answer" },
        ], "refused": ["http://c:1: there is no pool \"p\""] });
        let expected = "file a.toml: 2 workers\ndns b:1: 3 workers, 3 of them missing from its last list; cannot be read: \
                        no answer\nleft out: http://c:1: there is no pool \"p\"\n";
        assert_eq!(sources(&discovery), expected);
        assert_eq!(sources(&Value::Null), "");
    }
}
