//! Answers about the server itself: `HELLO`, `INFO`, `CONFIG GET`, `COMMAND`.
//!
//! Clients choose what they send by the version that a server claims, so the version is that of the Redis whose
//! semantics the commands have; the name of this server stands beside it.

use std::fmt::Write;

use crate::commands::{Names, Specification};
use crate::metrics::RespCounters;
use crate::options::{key, word};
use crate::pattern;
use crate::reply::{Protocol, Reply};
use crate::server::Shared;
use crate::session::Session;
use crate::values::{Value, Values};

/// Version of Redis whose commands are implemented.
const REDIS_VERSION: &str = "7.2.0";

/// The answer to `HELLO`.
pub(crate) fn hello(session: &Session) -> Reply {
    let version = if session.protocol == Protocol::Three { 3 } else { 2 };
    let id = i64::try_from(session.id).unwrap_or(i64::MAX);
    Reply::Map(vec![
        (Reply::text("server"), Reply::text("kvasir")),
        (Reply::text("version"), Reply::text(REDIS_VERSION)),
        (Reply::text("proto"), Reply::Integer(version)),
        (Reply::text("id"), Reply::Integer(id)),
        (Reply::text("mode"), Reply::text("standalone")),
        (Reply::text("role"), Reply::text("master")),
        (Reply::text("modules"), Reply::Array(Vec::new())),
    ])
}

/// Returns the line of `CLIENT LIST` and `CLIENT INFO` for a connection.
pub(crate) fn client(session: &Session) -> String {
    let version = if session.protocol == Protocol::Three { 3 } else { 2 };
    format!("id={} name={} db=0 resp={version}\n", session.id, session.name.escape_ascii())
}

/// `COMMAND`, `COMMAND COUNT`, `LIST`, `INFO name…`, `DOCS`.
pub(crate) fn command(names: &Names, arguments: &[Value]) -> Result<Reply, Reply> {
    let all = || Reply::Array(names.listed().map(Specification::describe).collect());
    let Some(subcommand) = arguments.get(1) else { return Ok(all()) };
    match word(subcommand).as_str() {
        "COUNT" => Ok(Reply::count(names.listed().count())),
        "LIST" => Ok(Reply::Array(names.listed().map(|line| Reply::text(line.name)).collect())),
        "DOCS" => Ok(Reply::Map(Vec::new())),
        "INFO" if arguments.len() == 2 => Ok(all()),
        "INFO" => {
            let known = |name: &Value| names.find(name.contiguous().unwrap_or_default());
            let describe = |name| known(name).map_or(Reply::Null, Specification::describe);
            Ok(Reply::Array(arguments[2..].iter().map(describe).collect()))
        }
        _ => Err(Reply::error("ERR unknown subcommand. Try COMMAND HELP.")),
    }
}

/// `CONFIG GET pattern…`; nothing can be set.
pub(crate) fn config<V: Values>(shared: &Shared<V>, arguments: &[Value]) -> Result<Reply, Reply> {
    if word(&arguments[1]) != "GET" || arguments.len() < 3 {
        return Err(Reply::error("ERR only CONFIG GET is known: the configuration is a file of this server"));
    }
    let config = &shared.config;
    let settings = [
        ("appendonly", "no".to_owned()),
        ("databases", "1".to_owned()),
        ("maxclients", config.clients_max.to_string()),
        ("maxmemory", shared.values.usage().bytes_max.to_string()),
        ("proto-max-bulk-len", config.value_bytes_max.to_string()),
        ("save", String::new()),
        ("timeout", config.idle_timeout.as_secs().to_string()),
    ];
    let mut told = Vec::new();
    for (name, value) in settings {
        let mut wanted = arguments[2..].iter().filter_map(|wanted| key(wanted).ok());
        if wanted.any(|wanted| pattern::fits(&wanted.to_ascii_lowercase(), name.as_bytes())) {
            told.push((Reply::text(name), Reply::text(value)));
        }
    }
    Ok(Reply::Map(told))
}

/// `INFO [section…]`.
pub(crate) fn info<V: Values>(shared: &Shared<V>, arguments: &[Value]) -> Reply {
    let wanted: Vec<String> = arguments[1..].iter().map(word).collect();
    let all = wanted.is_empty()
        || wanted.iter().any(|word| matches!(word.as_str(), "ALL" | "DEFAULT" | "EVERYTHING"));
    let (usage, counters) = (shared.values.usage(), &shared.counters);
    let count = RespCounters::read;
    let sections = [
        (
            "Server",
            vec![
                ("redis_version", REDIS_VERSION.to_owned()),
                ("redis_mode", "standalone".to_owned()),
                ("kvasir_version", env!("CARGO_PKG_VERSION").to_owned()),
                ("process_id", std::process::id().to_string()),
                ("uptime_in_seconds", shared.started.elapsed().as_secs().to_string()),
            ],
        ),
        (
            "Clients",
            vec![
                ("connected_clients", count(&counters.connections_open).to_string()),
                ("maxclients", shared.config.clients_max.to_string()),
            ],
        ),
        (
            "Memory",
            vec![
                ("used_memory", usage.bytes.to_string()),
                ("maxmemory", usage.bytes_max.to_string()),
                ("maxmemory_policy", "allkeys-lru".to_owned()),
            ],
        ),
        (
            "Stats",
            vec![
                ("total_connections_received", count(&counters.connections).to_string()),
                ("rejected_connections", count(&counters.connections_refused).to_string()),
                ("stalled_connections", count(&counters.connections_stalled).to_string()),
                ("total_commands_processed", count(&counters.commands).to_string()),
                ("total_error_replies", count(&counters.errors).to_string()),
                ("total_net_input_bytes", count(&counters.bytes_received).to_string()),
                ("total_net_output_bytes", count(&counters.bytes_sent).to_string()),
                ("keyspace_hits", count(&counters.hits).to_string()),
                ("keyspace_misses", count(&counters.misses).to_string()),
                ("throttled_writes", count(&counters.throttled).to_string()),
            ],
        ),
        ("Replication", vec![("role", "master".to_owned()), ("connected_slaves", "0".to_owned())]),
        ("Cluster", vec![("cluster_enabled", "0".to_owned())]),
        ("Keyspace", vec![("db0", format!("keys={},expires=0,avg_ttl=0", usage.keys))]),
    ];
    let mut text = String::new();
    for (name, lines) in sections {
        if all || wanted.contains(&name.to_ascii_uppercase()) {
            // Writing into a string cannot fail.
            let _ = write!(text, "# {name}\r\n");
            for (key, value) in lines {
                let _ = write!(text, "{key}:{value}\r\n");
            }
            text.push_str("\r\n");
        }
    }
    Reply::text(text)
}
