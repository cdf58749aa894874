//! Differences between two states of the configuration, key by key.

use std::fmt;

use serde_json::{Map, Value};

use crate::load::{Key, Section};
use crate::settings::Settings;

/// A key whose value changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Section of the key.
    pub section: &'static str,
    /// Name of the key.
    pub key: &'static str,
    /// Old value, as TOML.
    pub from: String,
    /// New value, as TOML.
    pub to: String,
    /// Whether a running gateway takes the new value; other keys take effect at the next start.
    pub is_live: bool,
}

impl fmt::Display for Change {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}: {} -> {}", self.section, self.key, self.from, self.to)
    }
}

/// Returns all keys whose values differ, in the order of the reference.
#[must_use]
pub fn changes(old: &Settings, new: &Settings) -> Vec<Change> {
    // Destructured by name, so that a section which is missing here does not compile.
    let Settings {
        serve,
        drain,
        planner,
        control,
        discovery,
        etcd,
        gateway,
        picker,
        access,
        tls,
        trace,
        guardrail,
        database,
        router,
        engine,
        worker,
        transfer,
        rdma,
        ebpf,
        host_tier,
        disk_tier,
        remote_tier,
        object_tier,
        store,
        faults,
        pools,
        splits,
    } = old;
    let mut all = Vec::new();
    compare(&mut all, serve, &new.serve);
    compare(&mut all, drain, &new.drain);
    compare(&mut all, planner, &new.planner);
    compare(&mut all, control, &new.control);
    compare(&mut all, discovery, &new.discovery);
    compare(&mut all, etcd, &new.etcd);
    compare(&mut all, gateway, &new.gateway);
    compare(&mut all, picker, &new.picker);
    compare(&mut all, access, &new.access);
    compare(&mut all, tls, &new.tls);
    compare(&mut all, trace, &new.trace);
    compare(&mut all, guardrail, &new.guardrail);
    compare(&mut all, database, &new.database);
    compare(&mut all, router, &new.router);
    compare(&mut all, engine, &new.engine);
    compare(&mut all, worker, &new.worker);
    compare(&mut all, transfer, &new.transfer);
    compare(&mut all, rdma, &new.rdma);
    compare(&mut all, ebpf, &new.ebpf);
    compare(&mut all, host_tier, &new.host_tier);
    compare(&mut all, disk_tier, &new.disk_tier);
    compare(&mut all, remote_tier, &new.remote_tier);
    compare(&mut all, object_tier, &new.object_tier);
    compare(&mut all, store, &new.store);
    compare(&mut all, faults, &new.faults);
    compare_lists(&mut all, pools, &new.pools);
    compare_lists(&mut all, splits, &new.splits);
    all
}

/// Returns every key with its value as TOML text, by section.
fn to_json(settings: &Settings) -> Value {
    // Destructured by name, so that a section which is missing here does not compile.
    let Settings {
        serve,
        drain,
        planner,
        control,
        discovery,
        etcd,
        gateway,
        picker,
        access,
        tls,
        trace,
        guardrail,
        database,
        router,
        engine,
        worker,
        transfer,
        rdma,
        ebpf,
        host_tier,
        disk_tier,
        remote_tier,
        object_tier,
        store,
        faults,
        pools,
        splits,
    } = settings;
    let mut all = Map::new();
    let mut add = |(path, table): (&str, Value)| drop(all.insert(path.to_owned(), table));
    add(table(serve));
    add(table(drain));
    add(table(planner));
    add(table(control));
    add(table(discovery));
    add(table(etcd));
    add(table(gateway));
    add(table(picker));
    add(table(access));
    add(table(tls));
    add(table(trace));
    add(table(guardrail));
    add(table(database));
    add(table(router));
    add(table(engine));
    add(table(worker));
    add(table(transfer));
    add(table(rdma));
    add(table(ebpf));
    add(table(host_tier));
    add(table(disk_tier));
    add(table(remote_tier));
    add(table(object_tier));
    add(table(store));
    add(table(faults));
    add(("pool", pools.iter().map(|pool| table(pool).1).collect()));
    add(("split", splits.iter().map(|split| table(split).1).collect()));
    Value::Object(all)
}

/// Returns the settings in effect in a process that was started with `started` and has read `now` since: live
/// keys have their new values, all other keys the values at start.
#[must_use]
pub fn in_force(started: &Settings, now: &Settings) -> Value {
    let (mut all, fresh) = (to_json(started), to_json(now));
    for Change { section, key, .. } in changes(started, now).into_iter().filter(|change| change.is_live) {
        match (&mut all[section], &fresh[section]) {
            (Value::Array(tables), Value::Array(fresh)) => {
                for (table, fresh) in tables.iter_mut().zip(fresh) {
                    table[key] = fresh[key].clone();
                }
            }
            (table, fresh) => table[key] = fresh[key].clone(),
        }
    }
    all
}

fn table<S: Section>(section: &S) -> (&'static str, Value) {
    let value = |key: &Key<S>| (key.name.to_owned(), Value::String((key.show)(section)));
    (S::PATH, Value::Object(S::keys().iter().map(value).collect()))
}

fn compare<S: Section>(all: &mut Vec<Change>, old: &S, new: &S) {
    for key in S::keys() {
        let (from, to) = ((key.show)(old), (key.show)(new));
        if from != to {
            all.push(Change { section: S::PATH, key: key.name, from, to, is_live: key.is_live });
        }
    }
}

/// Compares the tables of an array, key by key over all of them. If a table was added or removed, none of the
/// keys is live.
fn compare_lists<S: Section>(all: &mut Vec<Change>, old: &[S], new: &[S]) {
    for key in S::keys() {
        let shown = |tables: &[S]| {
            let values: Vec<String> = tables.iter().map(|table| (key.show)(table)).collect();
            values.join("; ")
        };
        let (from, to) = (shown(old), shown(new));
        if from != to {
            let is_live = key.is_live && old.len() == new.len();
            all.push(Change { section: S::PATH, key: key.name, from, to, is_live });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;

    #[test]
    fn each_key_that_differs_is_told_with_both_values() {
        let old = parse("[router]\ntemperature = 0.5\n[gateway]\nmodel = \"a\"\n").expect("parses");
        let new =
            parse("[router]\nstrategy = \"cost\"\n[gateway]\nmodel = \"a\"\nlisten = \"127.0.0.1:1\"\n")
                .expect("parses");
        let told: Vec<(String, bool)> =
            changes(&old, &new).iter().map(|change| (change.to_string(), change.is_live)).collect();
        assert_eq!(
            told,
            [
                ("gateway.listen: \"127.0.0.1:8000\" -> \"127.0.0.1:1\"".to_owned(), false),
                ("router.strategy: \"predicted-time\" -> \"cost\"".to_owned(), true),
                ("router.temperature: 0.5 -> 0.0".to_owned(), true),
            ]
        );
        assert_eq!(changes(&new, &new), []);
        let shown = to_json(&new);
        assert_eq!(shown["router"]["strategy"], "\"cost\"");
        assert_eq!(shown["pool"], Value::Array(Vec::new()));
        let shown = in_force(&old, &new);
        assert_eq!(shown["router"]["strategy"], "\"cost\"");
        assert_eq!(shown["gateway"]["listen"], "\"127.0.0.1:8000\"", "it waits for the next start");
    }
}
