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
    let mut changes = Changes(Vec::new());
    visit(old, new, &mut changes);
    changes.0
}

/// Returns every key with its value as TOML text, by section.
fn to_json(settings: &Settings) -> Value {
    let mut tables = Tables(Map::new());
    visit(settings, settings, &mut tables);
    Value::Object(tables.0)
}

/// Takes the sections of two states of the configuration.
trait Visitor {
    fn section<S: Section>(&mut self, old: &S, new: &S);

    /// The tables of an array.
    fn list<S: Section>(&mut self, old: &[S], new: &[S]);
}

/// Visits all sections in the order of the reference.
fn visit(old: &Settings, new: &Settings, visitor: &mut impl Visitor) {
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
    visitor.section(serve, &new.serve);
    visitor.section(drain, &new.drain);
    visitor.section(planner, &new.planner);
    visitor.section(control, &new.control);
    visitor.section(discovery, &new.discovery);
    visitor.section(etcd, &new.etcd);
    visitor.section(gateway, &new.gateway);
    visitor.section(picker, &new.picker);
    visitor.section(access, &new.access);
    visitor.section(tls, &new.tls);
    visitor.section(trace, &new.trace);
    visitor.section(guardrail, &new.guardrail);
    visitor.section(database, &new.database);
    visitor.section(router, &new.router);
    visitor.section(engine, &new.engine);
    visitor.section(worker, &new.worker);
    visitor.section(transfer, &new.transfer);
    visitor.section(rdma, &new.rdma);
    visitor.section(ebpf, &new.ebpf);
    visitor.section(host_tier, &new.host_tier);
    visitor.section(disk_tier, &new.disk_tier);
    visitor.section(remote_tier, &new.remote_tier);
    visitor.section(object_tier, &new.object_tier);
    visitor.section(store, &new.store);
    visitor.section(faults, &new.faults);
    visitor.list(pools, &new.pools);
    visitor.list(splits, &new.splits);
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

/// The keys that differ.
struct Changes(Vec<Change>);

impl Visitor for Changes {
    fn section<S: Section>(&mut self, old: &S, new: &S) {
        self.list(std::slice::from_ref(old), std::slice::from_ref(new));
    }

    /// Compares key by key over all tables. If a table was added or removed, none of the keys is live.
    fn list<S: Section>(&mut self, old: &[S], new: &[S]) {
        for key in S::keys() {
            let shown = |tables: &[S]| {
                let values: Vec<String> = tables.iter().map(|table| (key.show)(table)).collect();
                values.join("; ")
            };
            let (from, to) = (shown(old), shown(new));
            if from != to {
                let is_live = key.is_live && old.len() == new.len();
                self.0.push(Change { section: S::PATH, key: key.name, from, to, is_live });
            }
        }
    }
}

/// The new values, by section.
struct Tables(Map<String, Value>);

impl Visitor for Tables {
    fn section<S: Section>(&mut self, _: &S, new: &S) {
        self.0.insert(S::PATH.to_owned(), table(new));
    }

    fn list<S: Section>(&mut self, _: &[S], new: &[S]) {
        self.0.insert(S::PATH.to_owned(), new.iter().map(table).collect());
    }
}

fn table<S: Section>(section: &S) -> Value {
    let value = |key: &Key<S>| (key.name.to_owned(), Value::String((key.show)(section)));
    Value::Object(S::keys().iter().map(value).collect())
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
