//! Dependencies keep the rules of `.deny.toml`: licences, one version of each crate, crates that must not come in.
//!
//! `cargo deny` checks the same file. It takes minutes to build and a database that CI cannot reach, so CI has this test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use super::{read, root};

/// A crate that is built into the product.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Dependency {
    name: String,
    version: String,
    licence: String,
}

/// Parses lines of `cargo tree --format '{p}\t{l}'`: `name vVERSION (…)`, a tab and the licence.
fn parse(tree: &str) -> BTreeSet<Dependency> {
    let of_line = |line: &str| {
        let (package, licence) = line.split_once('\t')?;
        let mut words = package.split(' ');
        let (name, version) = (words.next()?.to_owned(), words.next()?.strip_prefix('v')?.to_owned());
        Some(Dependency { name, version, licence: licence.trim_end_matches(" (*)").to_owned() })
    };
    tree.lines().filter_map(of_line).collect()
}

fn built() -> BTreeSet<Dependency> {
    let output = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--locked",
            "--workspace",
            "--all-features",
            "--edges",
            "normal,build",
            "--prefix",
            "none",
        ])
        .args(["--format", "{p}\t{l}"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    parse(&String::from_utf8_lossy(&output.stdout))
}

/// Whether an SPDX expression is satisfied by the allowed licences. `/` is the old spelling of OR.
fn is_allowed(expression: &str, allowed: &BTreeSet<&str>) -> bool {
    fn any<'a>(
        words: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>,
        allowed: &BTreeSet<&str>,
    ) -> bool {
        let mut result = all(words, allowed);
        while words.next_if_eq(&"OR").is_some() {
            result |= all(words, allowed);
        }
        result
    }
    fn all<'a>(
        words: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>,
        allowed: &BTreeSet<&str>,
    ) -> bool {
        let mut result = one(words, allowed);
        while words.next_if_eq(&"AND").is_some() {
            result &= one(words, allowed);
        }
        result
    }
    fn one<'a>(
        words: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>,
        allowed: &BTreeSet<&str>,
    ) -> bool {
        let Some(word) = words.next() else { return false };
        if word == "(" {
            let result = any(words, allowed);
            return words.next() == Some(")") && result;
        }
        match words.next_if_eq(&"WITH").and_then(|_| words.next()) {
            Some(exception) => allowed.contains(format!("{word} WITH {exception}").as_str()),
            None => allowed.contains(word),
        }
    }
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut words = spaced.split_whitespace().peekable();
    any(&mut words, allowed) && words.next().is_none()
}

/// Versions of a crate beside the newest one, as `name@version`.
fn duplicates(dependencies: &BTreeSet<Dependency>) -> BTreeSet<String> {
    let mut versions: BTreeMap<&str, Vec<(Vec<u64>, &str)>> = BTreeMap::new();
    for dependency in dependencies {
        let numbers = dependency.version.split(['.', '-', '+']).map_while(|part| part.parse().ok()).collect();
        versions.entry(&dependency.name).or_default().push((numbers, &dependency.version));
    }
    let older = |(name, mut versions): (&str, Vec<(Vec<u64>, &str)>)| {
        versions.sort();
        versions.dedup();
        versions.pop();
        versions.into_iter().map(|(_, version)| format!("{name}@{version}")).collect::<Vec<_>>()
    };
    versions.into_iter().flat_map(older).collect()
}

#[test]
fn dependencies_keep_their_rules() {
    let rules: toml::Table = read(Path::new(".deny.toml")).parse().expect("TOML");
    let crates = |list: &str| -> BTreeSet<String> {
        let rows = rules["bans"][list].as_array().expect("a list");
        rows.iter().map(|row| row["crate"].as_str().expect("a crate").to_owned()).collect()
    };
    let allowed: BTreeSet<&str> = rules["licenses"]["allow"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|licence| licence.as_str())
        .collect();
    let built = built();
    assert!(built.len() > 100, "{} crates", built.len());

    let wrong: Vec<&Dependency> =
        built.iter().filter(|dependency| !is_allowed(&dependency.licence, &allowed)).collect();
    assert!(wrong.is_empty(), "licences that are not allowed: {wrong:#?}");
    let banned = crates("deny");
    let found: Vec<&Dependency> =
        built.iter().filter(|dependency| banned.contains(&dependency.name)).collect();
    assert!(found.is_empty(), "crates that must not come in: {found:#?}");
    let (duplicates, known) = (duplicates(&built), crates("skip"));
    let new: Vec<&String> = duplicates.difference(&known).collect();
    assert!(new.is_empty(), "crates in several versions that `.deny.toml` does not name: {new:#?}");
    let gone: Vec<&String> = known.difference(&duplicates).collect();
    assert!(gone.is_empty(), "`.deny.toml` names versions that are not built any more: {gone:#?}");
}

#[test]
fn rules_are_understood() {
    let allowed = BTreeSet::from(["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"]);
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("GPL-3.0/MIT", true),
        ("MIT AND GPL-3.0", false),
        ("ISC AND (GPL-3.0 OR MIT)", true),
        ("(GPL-3.0 OR MIT) AND BSL-1.0", false),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("Apache-2.0", false),
        ("(MIT", false),
        ("", false),
    ] {
        assert_eq!(is_allowed(expression, &allowed), expected, "{expression}");
    }
    let tree =
        "a v1.2.0\tMIT\na v1.10.0 (proc-macro)\tMIT (*)\nb v2.0.0-rc.1 (/path)\tISC\n\nc v1.0.0\tMIT\n";
    assert_eq!(duplicates(&parse(tree)), BTreeSet::from(["a@1.2.0".to_owned()]));
    assert_eq!(parse(tree).len(), 4);
}
