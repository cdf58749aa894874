//! Comments open with their subject, every file has a header, names say what is inside, and no file lies unused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{files, read};

/// First words of a comment that leave its subject out: the reader has to guess it from the code.
const OPENINGS: [&str; 20] = [
    "What", "Which", "Whatever", "Whoever", "Whose", "Whom", "Who", "Those", "It", "Its", "They", "Their",
    "Nobody", "Somebody", "Others", "Ours", "Why", "How", "Where", "That",
];
/// Endings of type names, and names of modules, that say nothing about what is inside.
const EMPTY_TYPES: [&str; 5] = ["Manager", "Helper", "Helpers", "Util", "Utils"];
const EMPTY_MODULES: [&str; 5] = ["common", "util", "utils", "helper", "helpers"];

/// A comment line's marker and text.
fn comment(line: &str) -> Option<(&'static str, &str)> {
    let line = line.trim_start();
    ["//!", "///", "//"].into_iter().find_map(|marker| Some((marker, line.strip_prefix(marker)?.trim())))
}

/// Lines of a source that open a comment with one of [`OPENINGS`], from 1.
fn banned_openings(source: &str) -> Vec<usize> {
    let mut found = Vec::new();
    let mut before = None;
    for (number, line) in source.lines().enumerate() {
        let here = comment(line);
        if let Some((marker, text)) = here {
            let is_first =
                before.is_none_or(|(other, text): (&str, &str)| other != marker || text.is_empty());
            let word = text.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
            if is_first && OPENINGS.contains(&word) {
                found.push(number + 1);
            }
        }
        before = here;
    }
    found
}

/// Names of types and modules that a source declares and that say nothing.
fn empty_names(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in source.lines().filter(|line| comment(line).is_none()) {
        let words: Vec<&str> =
            line.split(|letter: char| !(letter.is_alphanumeric() || letter == '_')).collect();
        for pair in words.windows(2) {
            let is_empty = match pair[0] {
                "struct" | "enum" | "trait" | "type" => EMPTY_TYPES.iter().any(|end| pair[1].ends_with(end)),
                "mod" => EMPTY_MODULES.contains(&pair[1]),
                _ => false,
            };
            if is_empty {
                found.push(pair[1].to_owned());
            }
        }
    }
    found
}

#[test]
fn comments_open_with_their_subject() {
    let mut found = Vec::new();
    for file in files("rs") {
        let lines = banned_openings(&read(&file));
        found.extend(lines.into_iter().map(|line| format!("{}:{line}", file.display())));
    }
    assert!(found.is_empty(), "comments without a subject: {found:#?}");
    // The check itself.
    let planted =
        "/// Slots.\n///\n/// What is free.\nlet a = 1; // It\n// One.\n// It goes on.\n//! Which.\n";
    assert_eq!(banned_openings(planted), [3, 7], "a paragraph's first line alone is an opening");
}

#[test]
fn every_file_has_a_header() {
    let without: Vec<PathBuf> =
        files("rs").into_iter().filter(|file| !read(file).starts_with("//!")).collect();
    assert!(without.is_empty(), "files without a `//!` header: {without:#?}");
}

#[test]
fn names_say_what_is_inside() {
    let mut found = Vec::new();
    for file in files("rs") {
        found.extend(empty_names(&read(&file)).into_iter().map(|name| format!("{}: {name}", file.display())));
    }
    assert!(found.is_empty(), "{found:#?}");
    // In two halves, so that this file does not declare them.
    let planted = ["pub struct Pool", "Manager;\nmod ", "utils;\n// mod ", "common\nmod pools;"].concat();
    assert_eq!(empty_names(&planted), ["PoolManager", "utils"]);
}

/// Names of modules that a source declares, and paths that it includes.
fn declared(source: &str) -> impl Iterator<Item = String> {
    let modules = source.lines().filter_map(|line| {
        let (_, name) = line.split_once("mod ")?;
        Some(name.split(|letter: char| !(letter.is_alphanumeric() || letter == '_')).next()?.to_owned())
    });
    let paths = source
        .lines()
        .filter(|line| line.contains("path = \"") || line.contains("include!("))
        .filter_map(|line| {
            let path = Path::new(line.split('"').nth(1)?);
            match path.file_stem()?.to_str()? {
                "mod" => Some(path.parent()?.file_name()?.to_str()?.to_owned()),
                stem => Some(stem.to_owned()),
            }
        });
    modules.chain(paths).collect::<Vec<_>>().into_iter()
}

/// Cargo compiles what is declared, and is silent about the rest.
#[test]
fn every_file_is_part_of_a_crate() {
    // Crates by folder, the deepest first.
    let mut crates: Vec<PathBuf> = files("toml")
        .into_iter()
        .filter(|file| file.ends_with("Cargo.toml"))
        .filter_map(|file| file.parent().map(Path::to_owned))
        .collect();
    crates.sort_by_key(|folder| std::cmp::Reverse(folder.components().count()));
    let owner =
        |file: &Path| crates.iter().find(|folder| file.starts_with(folder)).cloned().unwrap_or_default();
    let sources = files("rs");
    let mut names: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
    let mut everywhere = BTreeSet::new();
    for file in &sources {
        let text = read(file);
        names.entry(owner(file)).or_default().extend(declared(&text));
        // A file of another crate is reached by its path.
        everywhere.extend(declared(&text).filter(|_| text.contains("#[path")));
    }
    let targets: String = crates.iter().map(|folder| read(&folder.join("Cargo.toml"))).collect();
    let is_target = |file: &Path| {
        let folder = owner(file);
        let inside = file.strip_prefix(&folder).unwrap_or(file);
        let text = inside.to_string_lossy();
        let is_by_convention = matches!(&*text, "src/lib.rs" | "src/main.rs" | "build.rs")
            || (inside.components().count() == 2
                && ["tests", "benches", "examples"].iter().any(|start| inside.starts_with(start)))
            || text.starts_with("src/bin/");
        is_by_convention || targets.contains(&format!("{text}\"")) || file.ends_with("main.rs")
    };
    let mut unused = Vec::new();
    for file in &sources {
        let stem = match file.file_stem().and_then(|stem| stem.to_str()) {
            Some("mod") => file.parent().and_then(Path::file_name).and_then(|name| name.to_str()),
            stem => stem,
        };
        let stem = stem.expect("a name");
        let is_declared =
            names.get(&owner(file)).is_some_and(|names| names.contains(stem)) || everywhere.contains(stem);
        if !is_declared && !is_target(file) {
            unused.push(file.clone());
        }
    }
    assert!(unused.is_empty(), "files that no crate includes: {unused:#?}");
}
