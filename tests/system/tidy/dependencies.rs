//! The dependency map in the root `Cargo.toml` equals the output of `cargo metadata`; the committed reference
//! of the configuration equals the text generated from the declarations.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{cargo_metadata, root};

type Edges = BTreeMap<String, BTreeSet<String>>;

fn texts(value: &Value) -> BTreeSet<String> {
    value.as_array().into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

/// Returns the edges that exist although the map does not allow them, and the allowed edges that do not
/// exist.
fn differences(declared: &Edges, found: &Edges) -> Vec<String> {
    let mut out = Vec::new();
    for name in declared.keys().chain(found.keys()).collect::<BTreeSet<_>>() {
        match (declared.get(name), found.get(name)) {
            (None, _) => out.push(format!("{name} is not in the map")),
            (_, None) => out.push(format!("{name} is in the map, but is no member")),
            (Some(declared), Some(found)) => {
                out.extend(
                    found.difference(declared).map(|other| format!("{name} → {other} is not allowed")),
                );
                out.extend(
                    declared
                        .difference(found)
                        .map(|other| format!("{name} → {other} is allowed, but unused")),
                );
            }
        }
    }
    out
}

#[test]
fn dependencies_are_those_of_the_map() {
    let metadata = cargo_metadata();
    let declared: Edges = metadata["metadata"]["walls"]
        .as_object()
        .expect("workspace.metadata.walls")
        .iter()
        .map(|(name, edges)| (name.clone(), texts(edges)))
        .collect();
    let packages = metadata["packages"].as_array().expect("packages");
    let found: Edges = packages
        .iter()
        .map(|package| {
            let dependencies = package["dependencies"].as_array().into_iter().flatten();
            let inside = dependencies.filter(|dependency| dependency["path"].is_string());
            let names = inside.filter_map(|dependency| dependency["name"].as_str().map(str::to_owned));
            let own = package["name"].as_str().expect("name").to_owned();
            // A crate's tests may depend on the crate itself with more features.
            (own.clone(), names.filter(|name| *name != own).collect())
        })
        .collect();
    assert_eq!(differences(&declared, &found), Vec::<String>::new());

    // Checks the check itself: a planted edge must be found.
    let mut planted = found.clone();
    planted.entry("dataplane-memory".to_owned()).or_default().insert("router-gateway".to_owned());
    assert_eq!(differences(&declared, &planted), ["dataplane-memory → router-gateway is not allowed"]);
}

/// "Nothing depends on control, bench or tools", apart from the composition root and the bench itself.
#[test]
fn planes_do_not_look_upwards() {
    for package in cargo_metadata()["packages"].as_array().expect("packages") {
        let name = package["name"].as_str().expect("name");
        let (plane, _) = name.split_once('-').unwrap_or((name, ""));
        let forbidden: &[&str] = match plane {
            "dataplane" => &["kvstore-", "router-", "control-", "tools-", "bench"],
            "kvstore" => &["router-", "control-", "tools-", "bench"],
            "router" => &["dataplane-", "control-", "tools-", "bench"],
            "tools" => &["control-", "bench"],
            _ => &[],
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let other = dependency["name"].as_str().expect("name");
            assert!(!forbidden.iter().any(|prefix| other.starts_with(prefix)), "{name} depends on {other}");
        }
    }
}

#[test]
fn the_committed_reference_is_up_to_date() {
    for (file, text) in [
        ("control/config/REFERENCE.md", control_config::markdown()),
        ("control/config/kvasir.example.toml", control_config::example()),
    ] {
        let committed = std::fs::read_to_string(root().join(file)).unwrap_or_default();
        assert!(
            committed == text,
            "{file} has drifted: regenerate it with `kvasir config schema` (see its first line)"
        );
    }
}
