//! Objects and their changes.

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Value, json};

/// Number of changes that are kept, unless a test sets another one. etcd's default compaction keeps five
/// minutes.
const WINDOW: usize = 10_000;

/// Kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// The object was created.
    Added,
    /// The object's content changed.
    Modified,
    /// The object was deleted; the change holds its last state.
    Deleted,
}

/// A change of an object.
#[derive(Debug, Clone)]
pub struct Change {
    /// Resource version of the change.
    pub version: u64,
    /// Kind of the change.
    pub kind: ChangeKind,
    /// Resource of the object: `pods`, `inferencepools`, …
    pub resource: String,
    /// The object after the change; for a deletion, with the deletion's version.
    pub object: Value,
    /// The object before the change; `None` if it was created.
    pub before: Option<Value>,
}

type Name = (String, String, String);

/// All objects by resource, namespace and name.
#[derive(Debug)]
pub struct Store {
    version: u64,
    objects: BTreeMap<Name, Value>,
    changes: VecDeque<Change>,
    window: usize,
}

impl Default for Store {
    fn default() -> Self {
        Self { version: 1, objects: BTreeMap::new(), changes: VecDeque::new(), window: WINDOW }
    }
}

fn name(resource: &str, object: &Value) -> Name {
    let text = |key: &str| object["metadata"][key].as_str().unwrap_or_default().to_owned();
    (resource.to_owned(), text("namespace"), text("name"))
}

impl Store {
    /// Returns the latest resource version.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Keeps only this many changes from now on.
    pub fn keep_changes(&mut self, window: usize) {
        self.window = window;
        self.forget();
    }

    fn forget(&mut self) {
        let surplus = self.changes.len().saturating_sub(self.window);
        self.changes.drain(..surplus);
    }

    /// Adds or replaces an object with a new resource version; returns the object with that version.
    pub fn put(&mut self, resource: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let before = self.objects.insert(name(resource, &object), object.clone());
        let kind = if before.is_some() { ChangeKind::Modified } else { ChangeKind::Added };
        self.note(resource, kind, object.clone(), before);
        object
    }

    /// Deletes an object; returns whether it existed.
    pub fn delete(&mut self, resource: &str, namespace: &str, name: &str) -> bool {
        let key = (resource.to_owned(), namespace.to_owned(), name.to_owned());
        let Some(before) = self.objects.remove(&key) else { return false };
        self.version += 1;
        let mut object = before.clone();
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.note(resource, ChangeKind::Deleted, object, Some(before));
        true
    }

    fn note(&mut self, resource: &str, kind: ChangeKind, object: Value, before: Option<Value>) {
        let change = Change { version: self.version, kind, resource: resource.to_owned(), object, before };
        self.changes.push_back(change);
        self.forget();
    }

    /// Drops all objects without recording changes, as a restored backup does; objects added later are new.
    pub fn clear_without_events(&mut self) {
        self.objects.clear();
        self.changes.clear();
        self.version += 1_000;
    }

    /// Returns an object.
    #[must_use]
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<&Value> {
        self.objects.get(&(resource.to_owned(), namespace.to_owned(), name.to_owned()))
    }

    /// Returns the objects of a namespace, in the order of their names.
    pub fn list<'a>(&'a self, resource: &'a str, namespace: &'a str) -> impl Iterator<Item = &'a Value> {
        let is_there = move |(of, space, _): &Name| of == resource && space == namespace;
        self.objects.iter().filter(move |(name, _)| is_there(name)).map(|(_, object)| object)
    }

    /// Returns the changes after a version, or `None` if some of them are no longer kept.
    #[must_use]
    pub fn since(&self, version: u64) -> Option<impl Iterator<Item = &Change>> {
        let oldest_kept = self.changes.front().map_or(self.version + 1, |change| change.version);
        (version + 1 >= oldest_kept && version <= self.version)
            .then(|| self.changes.iter().filter(move |change| change.version > version))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> Value {
        json!({"metadata": {"namespace": "n", "name": name}})
    }

    #[test]
    fn each_change_has_the_next_version_and_old_ones_are_forgotten() {
        let mut store = Store::default();
        let start = store.version();
        store.put("pods", pod("a"));
        store.put("pods", pod("a"));
        store.put("pods", pod("b"));
        assert!(store.delete("pods", "n", "a") && !store.delete("pods", "n", "a"));
        let kinds: Vec<ChangeKind> = store.since(start).expect("kept").map(|change| change.kind).collect();
        assert_eq!(kinds, [ChangeKind::Added, ChangeKind::Modified, ChangeKind::Added, ChangeKind::Deleted]);
        assert_eq!(store.list("pods", "n").count(), 1);
        store.keep_changes(2);
        assert!(store.since(start).is_none());
        assert_eq!(store.since(start + 2).map(Iterator::count), Some(2));
        assert!(store.since(store.version() + 1).is_none(), "a version that was never given");
        store.clear_without_events();
        assert!(store.since(start + 4).is_none() && store.list("pods", "n").count() == 0);
        assert_eq!(store.since(store.version()).map(Iterator::count), Some(0));
    }
}
