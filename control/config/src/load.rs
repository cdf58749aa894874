//! Parsing of a configuration file. All problems are collected before they are reported.

use std::fmt;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::pools::PoolSettings;
use crate::settings::{RdmaSettings, Settings};
use crate::value::{Kind, Range, Setting};

/// A key of a section, with its description, its default and its setter.
pub(crate) struct Key<S> {
    /// Name of the key.
    pub name: &'static str,
    /// Documentation text of the key.
    pub doc: String,
    /// Kind of value that the key takes.
    pub kind: Kind,
    /// Default value, as TOML.
    pub default: String,
    /// Allowed range in words; `None`: no range.
    pub range: Option<String>,
    /// Whether a running gateway takes a changed value.
    pub is_live: bool,
    /// Returns the key's value in a section, as TOML.
    pub show: fn(&S) -> String,
    assign: Assign<S>,
}

type Assign<S> = Box<dyn Fn(&mut S, &DeValue<'_>) -> Result<(), String>>;

impl<S: 'static> Key<S> {
    pub(crate) fn new<T: Setting + 'static>(
        name: &'static str,
        doc: String,
        default: &T,
        range: Range<T>,
        words: &'static [&'static str],
        set: fn(&mut S, T),
        show: fn(&S) -> String,
    ) -> Self {
        let kind = if words.is_empty() { T::kind() } else { Kind::Choice(words) };
        let described = match &range {
            (Some(low), Some(high)) => Some(format!("{} to {}", low.write(), high.write())),
            _ => None,
        };
        let in_words = described.clone();
        let assign = move |section: &mut S, value: &DeValue<'_>| {
            let value = T::read(value)?;
            if !words.is_empty() && !words.iter().any(|word| value.write() == format!("\"{word}\"")) {
                return Err(format!("{} is not one of: {}", value.write(), words.join(", ")));
            }
            if !value.is_within(&range) {
                return Err(format!(
                    "{} is out of range ({})",
                    value.write(),
                    in_words.as_deref().unwrap_or_default()
                ));
            }
            set(section, value);
            Ok(())
        };
        let default = default.write();
        let is_live = false;
        Self { name, doc, kind, default, range: described, is_live, show, assign: Box::new(assign) }
    }

    /// Sets whether a running gateway takes a changed value.
    pub(crate) fn live(self, is_live: bool) -> Self {
        Self { is_live, ..self }
    }
}

/// A table of the file.
pub(crate) trait Section: Default + Sized + 'static {
    /// Name of the table.
    const PATH: &'static str;
    /// Returns the documentation text of the section.
    fn doc() -> String;
    /// Returns the keys, in order of declaration.
    fn keys() -> Vec<Key<Self>>;
}

/// One problem of a configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Line, from 1.
    pub line: usize,
    /// Description of the problem.
    pub message: String,
}

/// Error of a configuration file that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {reason}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error text of the operating system.
        reason: String,
    },
    /// The file has problems. All of them are listed.
    #[error("{}", listed(path, problems))]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// The problems, ordered by line.
        problems: Vec<Problem>,
    },
}

fn listed(path: &Path, problems: &[Problem]) -> String {
    let lines =
        problems.iter().map(|problem| format!("{}:{}: {}", path.display(), problem.line, problem.message));
    lines.collect::<Vec<_>>().join("\n")
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "line {}: {}", self.line, self.message)
    }
}

/// Reads and parses a file.
pub fn load(path: &Path) -> Result<Settings, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| ConfigError::Unreadable { path: path.to_owned(), reason: error.to_string() })?;
    parse(&text).map_err(|problems| ConfigError::Invalid { path: path.to_owned(), problems })
}

/// Parses the text of a file.
pub fn parse(text: &str) -> Result<Settings, Vec<Problem>> {
    let line_of = |offset: usize| text[..offset.min(text.len())].matches('\n').count() + 1;
    let root = match DeTable::parse(text) {
        Ok(root) => root,
        Err(error) => {
            let line = line_of(error.span().map_or(0, |span| span.start));
            return Err(vec![Problem { line, message: error.message().to_owned() }]);
        }
    };
    let mut reader = Reader { problems: Vec::new(), line_of: &line_of };
    let settings = reader.settings(root.get_ref());
    if reader.problems.is_empty() {
        return Ok(settings);
    }
    reader.problems.sort_by_key(|problem| problem.line);
    Err(reader.problems)
}

struct Reader<'a> {
    problems: Vec<Problem>,
    line_of: &'a dyn Fn(usize) -> usize,
}

impl Reader<'_> {
    fn settings(&mut self, root: &DeTable<'_>) -> Settings {
        let known = [
            "serve",
            "drain",
            "planner",
            "control",
            "discovery",
            "etcd",
            "gateway",
            "picker",
            "access",
            "tls",
            "trace",
            "guardrail",
            "database",
            "router",
            "engine",
            "worker",
            "transfer",
            "rdma",
            "ebpf",
            "host_tier",
            "disk_tier",
            "remote_tier",
            "object_tier",
            "store",
            "faults",
            "pool",
            "split",
        ];
        for (key, _) in root.iter() {
            self.check_known(key, "table", &known);
        }
        let settings = Settings {
            serve: self.section(root),
            drain: self.section(root),
            planner: self.section(root),
            control: self.section(root),
            discovery: self.section(root),
            etcd: self.section(root),
            gateway: self.section(root),
            picker: self.section(root),
            access: self.section(root),
            tls: self.section(root),
            trace: self.section(root),
            guardrail: self.section(root),
            database: self.section(root),
            router: self.section(root),
            engine: self.section(root),
            worker: self.section(root),
            transfer: self.section(root),
            rdma: self.section(root),
            ebpf: self.section(root),
            host_tier: self.section(root),
            disk_tier: self.section(root),
            remote_tier: self.section(root),
            object_tier: self.section(root),
            store: self.section(root),
            faults: self.section(root),
            pools: self.list(root),
            splits: self.list(root),
        };
        if settings.serve.restart_pause > settings.serve.restart_pause_max {
            let at = root
                .iter()
                .find(|(key, _)| key.get_ref().as_ref() == "serve")
                .map_or(0, |(key, _)| key.span().start);
            self.report(at, "serve.restart_pause is longer than serve.restart_pause_max".to_owned());
        }
        if settings.disk_tier.capacity.0 > 0 && settings.disk_tier.path.is_empty() {
            let at = root
                .iter()
                .find(|(key, _)| key.get_ref().as_ref() == "disk_tier")
                .map_or(0, |(key, _)| key.span().start);
            self.report(at, "disk_tier.capacity is set, and disk_tier.path is empty".to_owned());
        }
        self.check_disk_paths(root, &settings);
        self.check_stores(root, &settings);
        self.check_pools(root, &settings);
        self.check_discovery(root, &settings);
        self.check_planner(root, &settings);
        self.check_rdma(root, &settings);
        settings
    }

    /// Reports problems of `[discovery]` that involve more than one key.
    fn check_discovery(&mut self, root: &DeTable<'_>, settings: &Settings) {
        let pool = &settings.discovery.dns_pool;
        let is_pool =
            pool.is_empty() || pool == "gateway" || settings.pools.iter().any(|other| other.name == *pool);
        if !is_pool {
            let section = root.iter().find(|(key, _)| key.get_ref().as_ref() == "discovery");
            let offset = section.map_or(0, |(key, _)| key.span().start);
            self.report(offset, format!("discovery.dns_pool: {pool:?} is no pool"));
        }
    }

    /// Reports disk tier folders over which the segment files cannot be spread evenly.
    fn check_disk_paths(&mut self, root: &DeTable<'_>, settings: &Settings) {
        let tier = &settings.disk_tier;
        let folders = tier.path.0.len() as u64;
        if folders < 2 || tier.capacity.0 == 0 {
            return;
        }
        // A file has whole pages of 4096 bytes.
        let segment = tier.segment.0.min(tier.capacity.0) / 4096 * 4096;
        let segments = tier.capacity.0.checked_div(segment).unwrap_or(0);
        let takes_folders = ["auto", "io_uring", "pread"].contains(&tier.engine.as_str());
        let problem = if folders > 64 || tier.path.0.iter().any(String::is_empty) {
            format!("disk_tier.path names {folders} folders: at most 64, and none empty")
        } else if !takes_folders {
            format!("disk_tier.path names {folders} folders, and `{}` takes one device", tier.engine)
        } else if !segments.is_multiple_of(folders) {
            let (capacity, segment) = (tier.capacity, tier.segment);
            format!(
                "disk_tier.capacity = \"{capacity}\" in files of disk_tier.segment = \"{segment}\" cannot be shared out over {folders} \
                 folders"
            )
        } else {
            return;
        };
        let section = root.iter().find(|(key, _)| key.get_ref().as_ref() == "disk_tier");
        let table = section.and_then(|(_, value)| value.get_ref().as_table());
        let key = table.and_then(|table| table.iter().find(|(key, _)| key.get_ref().as_ref() == "path"));
        self.report(key.map_or(0, |(key, _)| key.span().start), problem);
    }

    /// Reports entries of `gateway.stores` that are no URLs.
    fn check_stores(&mut self, root: &DeTable<'_>, settings: &Settings) {
        let is_url = |text: &str| {
            let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
            rest.is_some_and(|rest| {
                !rest.trim_end_matches('/').is_empty() && !rest.contains(char::is_whitespace)
            })
        };
        let section = root.iter().find(|(key, _)| key.get_ref().as_ref() == "gateway");
        let table = section.and_then(|(_, value)| value.get_ref().as_table());
        let key = table.and_then(|table| table.iter().find(|(key, _)| key.get_ref().as_ref() == "stores"));
        let offset = key.map_or(0, |(key, _)| key.span().start);
        for (number, store) in settings.gateway.stores.iter().enumerate() {
            if !is_url(store) {
                self.report(offset, format!("gateway.stores: {store:?} is no URL like http://10.0.0.5:7401"));
            } else if settings.gateway.stores[..number].contains(store) {
                self.report(offset, format!("gateway.stores names {store} twice"));
            }
        }
    }

    /// Reports malformed values of `[rdma]`. Whether the devices and addresses exist is known only at start.
    fn check_rdma(&mut self, root: &DeTable<'_>, settings: &Settings) {
        let RdmaSettings { gid, partition, near, .. } = &settings.rdma;
        let key = partition.strip_prefix("0x").and_then(|digits| u16::from_str_radix(digits, 16).ok());
        let is_memory = near == "host"
            || near.strip_prefix("gpu").is_some_and(|number| number.parse::<u32>().is_ok())
            || near.strip_prefix("host:").is_some_and(|number| number.parse::<u32>().is_ok())
            || near.contains(':')
                && near.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
        let wrong = [
            ("gid", gid, gid == "auto" || gid.parse::<u8>().is_ok(), "auto, or a row from 0 to 255"),
            (
                "partition",
                partition,
                partition == "default" || key.is_some_and(|key| key & 0x7FFF != 0),
                "default, or a partition key like 0x8001",
            ),
            ("near", near, near == "auto" || is_memory, "auto, gpu0, a PCI address, host or host:1"),
        ];
        let section = root.iter().find(|(key, _)| key.get_ref().as_ref() == "rdma");
        let value = section.and_then(|(_, value)| value.get_ref().as_table());
        for (name, text, is_right, expected) in wrong {
            if is_right {
                continue;
            }
            let place = value.and_then(|table| table.iter().find(|(key, _)| key.get_ref().as_ref() == name));
            let offset = place.map_or(0, |(key, _)| key.span().start);
            self.report(offset, format!("rdma.{name}: {text:?} is not one of: {expected}"));
        }
    }

    /// Reports problems of `[planner]` that involve more than one key.
    fn check_planner(&mut self, root: &DeTable<'_>, settings: &Settings) {
        let planner = &settings.planner;
        let section = root.iter().find(|(key, _)| key.get_ref().as_ref() == "planner");
        let offset = section.map_or(0, |(key, _)| key.span().start);
        for (role, min, max) in [
            ("prefill", planner.prefill_min, planner.prefill_max),
            ("decode", planner.decode_min, planner.decode_max),
        ] {
            // Without prefill workers, `prefill_min` has no effect.
            if min > max && max > 0 {
                self.report(offset, format!("planner.{role}_min is above planner.{role}_max"));
            }
        }
        if !planner.history.is_zero() && planner.choose_after > planner.history {
            let problem = "planner.choose_after is above planner.history: no share would ever be chosen";
            self.report(offset, problem.to_owned());
        }
        let roles = if planner.prefill_min.min(planner.prefill_max) > 0 { 2 } else { 1 };
        let least =
            (planner.prefill_min.min(planner.prefill_max) + planner.decode_min + roles * planner.spares)
                * planner.gpus;
        if least > planner.gpus_max {
            let problem = format!(
                "planner.gpus_max is {}, and the minimums need {least}, planner.spares included",
                planner.gpus_max
            );
            self.report(offset, problem);
        }
        if planner.mode == "act" && !settings.gateway.peers.is_empty() {
            let problem = "planner.mode = \"act\" starts workers on this machine's loopback, which gateway.peers cannot reach";
            self.report(offset, problem.to_owned());
        }
        if planner.mode == "act" && !settings.pools.is_empty() {
            let problem = "planner.mode = \"act\" plans for one model, and there are [[pool]] tables";
            self.report(offset, problem.to_owned());
        }
        for season in &planner.seasons {
            if crate::seasons::seconds(season).is_none() {
                self.report(offset, format!("planner.seasons: {season:?} is neither day nor week"));
            }
        }
    }

    /// Reports problems of pools and splits that involve more than one key.
    fn check_pools(&mut self, root: &DeTable<'_>, settings: &Settings) {
        const OF_GATEWAY: &str = "gateway";
        let line = |path: &str, at: usize| {
            let (_, value) = root.iter().find(|(key, _)| key.get_ref().as_ref() == path)?;
            let DeValue::Array(tables) = value.get_ref() else { return None };
            tables.get(at).map(|table| table.span().start)
        };
        let is_pool = |name: &str| name == OF_GATEWAY || settings.pools.iter().any(|pool| pool.name == name);
        for (at, pool) in settings.pools.iter().enumerate() {
            let offset = line("pool", at).unwrap_or(0);
            let name = &pool.name;
            if name.is_empty() || name == OF_GATEWAY {
                self.report(offset, format!("pool.name: {name:?} is no name of a pool"));
            }
            if settings.pools[..at].iter().any(|other| other.name == *name) {
                self.report(offset, format!("pool.name: there are two pools {name:?}"));
            }
            for other in pool.fallback.iter().filter(|other| !is_pool(other) || *other == name) {
                self.report(offset, format!("pool.fallback: {other:?} is no other pool"));
            }
        }
        for other in settings.gateway.fallback.iter().filter(|other| !is_pool(other) || *other == OF_GATEWAY)
        {
            let gateway = root.iter().find(|(key, _)| key.get_ref().as_ref() == OF_GATEWAY);
            let offset = gateway.map_or(0, |(key, _)| key.span().start);
            self.report(offset, format!("gateway.fallback: {other:?} is no pool"));
        }
        for (at, split) in settings.splits.iter().enumerate() {
            let offset = line("split", at).unwrap_or(0);
            if split.model.is_empty() || split.pools.is_empty() {
                self.report(offset, "a split needs a `model` and `pools`".to_owned());
            }
            let sides: Vec<Option<(&str, u32)>> = split.pools.iter().map(|side| weight_of(side)).collect();
            for (side, text) in sides.iter().zip(&split.pools) {
                if side.is_none_or(|(name, _)| !is_pool(name)) {
                    self.report(offset, format!("split.pools: {text:?} is no POOL=WEIGHT of a pool"));
                }
            }
            if sides.iter().flatten().all(|(_, weight)| *weight == 0) && !split.pools.is_empty() {
                self.report(offset, "split.pools: all weights are 0".to_owned());
            }
        }
        // Several pools may serve the same model name, as for a canary: the name then means the first of
        // them. Aliases and split names must be unique.
        let model_of =
            |pool: &PoolSettings| if pool.model.is_empty() { pool.name.clone() } else { pool.model.clone() };
        let models: Vec<String> =
            settings.pools.iter().map(model_of).chain([settings.gateway.model.clone()]).collect();
        let aliases = settings.pools.iter().enumerate().flat_map(|(at, pool)| {
            pool.aliases.iter().map(move |alias| (alias.as_str(), line("pool", at).unwrap_or(0)))
        });
        let splits = settings.splits.iter().enumerate();
        let splits = splits.map(|(at, split)| (split.model.as_str(), line("split", at).unwrap_or(0)));
        let mut seen: Vec<&str> = Vec::new();
        for (name, offset) in aliases.chain(splits).filter(|(name, _)| !name.is_empty()) {
            if seen.contains(&name) || models.iter().any(|model| model == name) {
                self.report(offset, format!("the model name {name:?} is used twice"));
            }
            seen.push(name);
        }
    }

    fn report(&mut self, offset: usize, message: String) {
        self.problems.push(Problem { line: (self.line_of)(offset), message });
    }

    fn check_known(&mut self, key: &Spanned<std::borrow::Cow<'_, str>>, what: &str, known: &[&str]) {
        let name = key.get_ref().as_ref();
        if known.contains(&name) {
            return;
        }
        let hint = nearest(name, known).map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
        self.report(key.span().start, format!("unknown {what} `{name}`{hint}"));
    }

    fn section<S: Section>(&mut self, root: &DeTable<'_>) -> S {
        let Some((key, value)) = root.iter().find(|(key, _)| key.get_ref().as_ref() == S::PATH) else {
            return S::default();
        };
        let DeValue::Table(table) = value.get_ref() else {
            self.report(key.span().start, format!("`{}` must be a table", S::PATH));
            return S::default();
        };
        self.table(table)
    }

    /// Reads a section that may occur several times.
    fn list<S: Section>(&mut self, root: &DeTable<'_>) -> Vec<S> {
        let Some((key, value)) = root.iter().find(|(key, _)| key.get_ref().as_ref() == S::PATH) else {
            return Vec::new();
        };
        let problem = format!("`{0}` must be tables of their own: [[{0}]]", S::PATH);
        let DeValue::Array(tables) = value.get_ref() else {
            self.report(key.span().start, problem);
            return Vec::new();
        };
        let mut list = Vec::new();
        for table in tables.iter() {
            match table.get_ref() {
                DeValue::Table(fields) => list.push(self.table(fields)),
                _ => self.report(table.span().start, problem.clone()),
            }
        }
        list
    }

    fn table<S: Section>(&mut self, table: &DeTable<'_>) -> S {
        let mut section = S::default();
        let keys = S::keys();
        let names: Vec<&str> = keys.iter().map(|key| key.name).collect();
        for (name, value) in table.iter() {
            self.check_known(name, &format!("key in [{}]", S::PATH), &names);
            let Some(key) = keys.iter().find(|key| key.name == name.get_ref().as_ref()) else { continue };
            if let Err(reason) = (key.assign)(&mut section, value.get_ref()) {
                self.report(value.span().start, format!("{}.{}: {reason}", S::PATH, key.name));
            }
        }
        section
    }
}

/// Parses a side of a split: the pool's name and its weight.
#[must_use]
pub fn weight_of(side: &str) -> Option<(&str, u32)> {
    let (name, weight) = side.split_once('=')?;
    Some((name.trim(), weight.trim().parse().ok()?))
}

/// Returns the closest known name, if its edit distance is at most half the length of `name`.
fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let best = known.iter().map(|other| (edit_distance(name, other), *other)).min()?;
    (best.0 <= name.len().max(3) / 2).then_some(best.1)
}

/// Returns the Levenshtein distance.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn all_problems_come_at_once_with_their_lines() {
        let text = "[gateway]\nlisten = \"nowhere\"\nretrys = 3\nbody_max = \"1 B\"\n\n[ruoter]\nx = 1\n\n[router]\nstrategy = \"best\"\ntemperature = -1\n";
        let problems = parse(text).expect_err("seven mistakes");
        let found: Vec<(usize, &str)> = problems
            .iter()
            .map(|problem| (problem.line, problem.message.split(' ').next().unwrap_or("")))
            .collect();
        assert_eq!(
            found,
            [
                (2, "gateway.listen:"),
                (3, "unknown"),
                (4, "gateway.body_max:"),
                (6, "unknown"),
                (10, "router.strategy:"),
                (11, "router.temperature:")
            ]
        );
        assert!(problems[1].message.contains("did you mean `retries`?"), "{}", problems[1].message);
        assert!(problems[3].message.contains("did you mean `router`?"), "{}", problems[3].message);
        assert!(
            problems[2].message.contains("out of range (\"1 KiB\" to \"1 GiB\")"),
            "{}",
            problems[2].message
        );
        assert!(problems[4].message.contains("cost, power-of-two"), "{}", problems[4].message);
    }

    #[test]
    fn what_names_no_device_is_found_without_one() {
        let found = |text: &str| -> Vec<String> {
            let problems = parse(text).err().unwrap_or_default();
            problems.iter().map(|problem| format!("{} {}", problem.line, problem.message)).collect()
        };
        let wrong = "[rdma]\ngid = \"x\"\npartition = \"0x8000\"\nnear = \"the moon\"\n";
        let problems = found(wrong);
        for (problem, start) in problems.iter().zip(["2 rdma.gid: ", "3 rdma.partition: ", "4 rdma.near: "]) {
            assert!(problem.starts_with(start), "{problems:?}");
        }
        assert_eq!(problems.len(), 3);
        for near in ["auto", "gpu7", "host", "host:1", "0000:17:00.0"] {
            let text = format!("[rdma]\nnear = \"{near}\"\npartition = \"0x0001\"\ngid = \"3\"\n");
            assert_eq!(found(&text), [] as [String; 0], "{near}");
        }
    }

    #[test]
    fn values_arrive() {
        let text = "serve.decode_workers = 3\n[transfer]\ndeadline = \"1500ms\"\ntransport = \"tcp\"\n[host_tier]\ncapacity = \"1 GiB\"\n[gateway]\nworkers = [\"http://a:1\", \"http://b:2\"]\n[router]\nhost_credit = 1\n";
        let settings = parse(text).expect("parses");
        assert_eq!(settings.serve.decode_workers, 3);
        assert_eq!(settings.transfer.deadline, Duration::from_millis(1500));
        assert_eq!(settings.host_tier.capacity.0, 1 << 30);
        assert_eq!(settings.gateway.workers.len(), 2);
        assert_eq!(settings.router.host_credit, 1.0);
        assert_eq!(parse(""), Ok(Settings::default()));
    }

    #[test]
    fn pools_and_splits_are_tables_of_their_own() {
        let text = "[[pool]]\nname = \"a\"\nworkers = [\"http://x:1\"]\nfallback = [\"gateway\"]\n[[pool]]\nname = \"b\"\n\
                    [[split]]\nmodel = \"m\"\npools = [\"a=90\", \"b = 10\"]\n";
        let settings = parse(text).expect("parses");
        assert_eq!(settings.pools.len(), 2);
        assert_eq!(settings.pools[0].workers, ["http://x:1"]);
        assert_eq!(weight_of(&settings.splits[0].pools[1]), Some(("b", 10)));
        for (text, line, part) in [
            ("[pool]\nname = \"a\"\n", 1, "[[pool]]"),
            ("[[pool]]\nname = \"a\"\n[[pool]]\nnane = \"a\"\n", 4, "did you mean `name`"),
            ("[[pool]]\nname = \"a\"\n[[pool]]\nname = \"a\"\n", 3, "two pools"),
            ("[[pool]]\nname = \"a\"\nfallback = [\"c\"]\n", 1, "\"c\" is no other pool"),
            ("[gateway]\nfallback = [\"c\"]\n", 1, "gateway.fallback"),
            ("[gateway]\nstores = [\"n0:7401\"]\n", 2, "\"n0:7401\" is no URL"),
            ("[gateway]\nstores = [\"http://a:1\", \"http://a:1\"]\n", 2, "http://a:1 twice"),
            ("\n[discovery]\ndns_pool = \"c\"\n", 2, "discovery.dns_pool"),
            ("\n[planner]\ndecode_min = 9\n", 2, "planner.decode_min is above"),
            ("\n[planner]\nhistory = \"1h\"\n", 2, "planner.choose_after is above planner.history"),
            ("\n[planner]\ngpus_max = 1\n", 2, "planner.gpus_max is 1, and the minimums need 2"),
            (
                "\n[planner]\nmode = \"act\"\n[gateway]\npeers = [\"http://a:1\"]\n",
                2,
                "which gateway.peers cannot reach",
            ),
            ("\n[planner]\nmode = \"act\"\n[[pool]]\nname = \"a\"\n", 2, "plans for one model"),
            ("\n[planner]\nseasons = [\"month\"]\n", 2, "planner.seasons: \"month\""),
            ("[[pool]]\nname = \"a\"\n[[split]]\nmodel = \"m\"\npools = [\"a\"]\n", 3, "POOL=WEIGHT"),
            ("[[pool]]\nname = \"a\"\n[[split]]\nmodel = \"m\"\npools = [\"a=0\"]\n", 3, "all weights"),
            ("[[pool]]\nname = \"a\"\n[[pool]]\nname = \"b\"\naliases = [\"a\"]\n", 3, "used twice"),
            ("[gateway]\nmodel = \"a\"\n[[pool]]\nname = \"b\"\naliases = [\"a\"]\n", 3, "used twice"),
            ("[[pool]]\nname = \"a\"\n[[split]]\nmodel = \"a\"\npools = [\"a=1\"]\n", 3, "used twice"),
        ] {
            let problems = parse(text).expect_err(text);
            assert!(
                problems.iter().any(|problem| problem.line == line && problem.message.contains(part)),
                "{text}: {problems:?}"
            );
        }
    }

    #[test]
    fn syntax_errors_name_their_line() {
        let problems = parse("[gateway]\n\nlisten = = 1\n").expect_err("no TOML");
        assert_eq!(problems[0].line, 3);
        assert_eq!(parse("gateway = 1").expect_err("no table")[0].message, "`gateway` must be a table");
        let problems = parse("[serve]\nrestart_pause = \"30s\"\n").expect_err("longer than the maximum");
        assert!(problems[0].message.contains("restart_pause_max"));
        let two = "[disk_tier]\ncapacity = \"512 MiB\"\npath = [\"/a\", \"/b\"]\n";
        assert_eq!(parse(two).expect("two folders").disk_tier.path.0, ["/a", "/b"]);
        for (more, told) in [
            ("segment = \"512 MiB\"\n", "cannot be shared out over 2 folders"),
            ("engine = \"spdk\"\n", "`spdk` takes one device"),
        ] {
            let problems = parse(&format!("{two}{more}")).expect_err("refused");
            assert!(problems[0].line == 3 && problems[0].message.contains(told), "{problems:?}");
        }
        let problems = parse("[disk_tier]\npath = 3\n").expect_err("no path");
        assert!(problems[0].message.contains("a path or a list of paths, found integer"), "{problems:?}");
        let problems = parse("\n[disk_tier]\ncapacity = \"1 GiB\"\n").expect_err("no folder");
        assert_eq!((problems[0].line, &problems[0].message[..18]), (2, "disk_tier.capacity"));
    }
}
