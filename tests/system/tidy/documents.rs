//! Links of documents lead somewhere, and their commands exist with the options that they show.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{cargo_metadata, files, read, root};

/// Targets of `[text](target)` that are no addresses of the web.
fn links(text: &str) -> Vec<String> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target.to_owned()))
        .filter(|target| !target.contains("://") && !target.contains(' '))
        .collect()
}

/// The anchor that a heading gets.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.collect::<String>().trim().to_lowercase().replace(' ', "-")
}

#[test]
fn links_lead_somewhere() {
    let mut broken = Vec::new();
    for file in files("md") {
        let text = read(&file);
        let folder = file.parent().unwrap_or(Path::new(""));
        for link in links(&text) {
            let (path, section) = link.split_once('#').unwrap_or((&link, ""));
            let target = if path.is_empty() { file.clone() } else { folder.join(path) };
            let is_there = root().join(&target).exists();
            let has_section = section.is_empty()
                || target.extension().is_none_or(|extension| extension != "md")
                || is_there
                    && read(&target)
                        .lines()
                        .any(|line| line.starts_with('#') && anchor(line.trim_start_matches('#')) == section);
            if !is_there || !has_section {
                broken.push(format!("{}: {link}", file.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere: {broken:#?}");
    assert_eq!(links("[a](b.md#c) and [d](https://e)"), ["b.md#c"]);
    assert_eq!(
        anchor(" Endpoint picker for Envoy and the Gateway API"),
        "endpoint-picker-for-envoy-and-the-gateway-api"
    );
}

/// Commands of a document: lines of its `sh` blocks, and code within lines that begins with a known program.
fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fence: Option<bool> = None;
    for line in text.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            fence = fence.is_none().then(|| matches!(language.trim(), "sh" | "bash" | "shell"));
            continue;
        }
        match fence {
            Some(true) => found.push(line.trim().to_owned()),
            Some(false) => {}
            None => found.extend(line.split('`').skip(1).step_by(2).map(|code| code.replace("\\|", "|"))),
        }
    }
    let programs = [
        "kvasir ",
        "cargo ",
        "tests/",
        "bench/",
        "dataplane/",
        "kvstore/",
        "python3 ",
        "target/release/kvasir ",
        "target/debug/kvasir ",
    ];
    let parts =
        found.iter().flat_map(|line| line.split(" && ").flat_map(|part| part.split(" | "))).map(|part| {
            // Variables before a command are no part of it.
            let mut words = part.trim();
            while let Some((first, rest)) = words.split_once(' ')
                && first.contains('=')
                && first.chars().next().is_some_and(|letter| letter.is_ascii_uppercase())
            {
                words = rest.trim_start();
            }
            words.to_owned()
        });
    parts.filter(|part| programs.iter().any(|program| part.starts_with(program))).collect()
}

/// Help texts of `kvasir` and its commands.
struct Helps(BTreeMap<Vec<String>, Option<String>>);

impl Helps {
    fn of(&mut self, path: &[String]) -> Option<String> {
        let help = self.0.entry(path.to_vec()).or_insert_with(|| {
            let output = Command::new(env!("CARGO_BIN_EXE_kvasir"))
                .args(path)
                .arg("--help")
                .output()
                .expect("kvasir runs");
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
        });
        help.clone()
    }

    /// The fault of a command line, if it has one.
    fn fault(&mut self, words: &[&str]) -> Option<String> {
        let mut path = Vec::new();
        let mut help = self.of(&path)?;
        let mut rest = words;
        while let Some((word, others)) = rest.split_first()
            && word.chars().all(|letter| letter.is_ascii_lowercase() || letter == '-')
            && !word.starts_with('-')
            && names(&help, word)
        {
            path.push((*word).to_owned());
            help = self.of(&path)?;
            rest = others;
        }
        let name = path.join(" ");
        if let Some(word) = rest.first()
            && help.contains("\nCommands:")
            && word.starts_with(|letter: char| letter.is_ascii_lowercase())
            && let Some(unknown) = word.split('|').find(|command| !names(&help, command))
        {
            return Some(format!("kvasir {name} has no command {unknown}"));
        }
        let clean = |word: &str| -> String {
            let word = word.trim_matches(|letter: char| "[]()…,;:.".contains(letter));
            word.split(['=', '|', ']']).next().unwrap_or_default().to_owned()
        };
        let unknown = |option: &String| {
            !help
                .split(|letter: char| letter.is_whitespace() || ",[]<>=".contains(letter))
                .any(|word| word == option)
        };
        rest.iter()
            .map(|word| clean(word))
            .filter(|word| word.starts_with("--") && word.len() > 2)
            .find(unknown)
            .map(|option| format!("kvasir {name} has no option {option}"))
    }
}

/// Whether a help text has a line of this command.
fn names(help: &str, command: &str) -> bool {
    help.lines().any(|line| line.trim_start().split(' ').next() == Some(command))
}

/// Packages with the names of their targets.
fn packages() -> BTreeMap<String, BTreeSet<String>> {
    let metadata = cargo_metadata();
    let packages = metadata["packages"].as_array().expect("packages");
    let targets = |package: &serde_json::Value| {
        let targets = package["targets"].as_array().expect("targets");
        targets.iter().filter_map(|target| target["name"].as_str().map(str::to_owned)).collect()
    };
    packages
        .iter()
        .map(|package| (package["name"].as_str().expect("a name").to_owned(), targets(package)))
        .collect()
}

fn fault_of_cargo(
    words: &[&str],
    packages: &BTreeMap<String, BTreeSet<String>>,
    helps: &mut Helps,
) -> Option<String> {
    let dashes = words.iter().position(|word| *word == "--").unwrap_or(words.len());
    let (own, others) = words.split_at(dashes);
    let after =
        |option: &str| own.iter().position(|word| *word == option).and_then(|at| own.get(at + 1)).copied();
    if let Some(manifest) = after("--manifest-path") {
        return (!root().join(manifest).exists()).then(|| format!("there is no {manifest}"));
    }
    if let Some(package) = after("-p")
        && !packages.contains_key(package)
    {
        return Some(format!("there is no package {package}"));
    }
    for kind in ["--test", "--example", "--bench"] {
        if let Some(target) = after(kind)
            && target.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-".contains(letter))
            && !packages.values().any(|targets| targets.contains(target))
        {
            return Some(format!("there is no target {target}"));
        }
    }
    if own.first() != Some(&"run") || after("--example").is_some() || others.len() < 2 {
        return None;
    }
    match after("-p").unwrap_or("control-node") {
        "control-node" => helps.fault(&others[1..]),
        // The same commands as those of `kvasir bench`.
        "bench" => helps.fault(&[&["bench"], &others[1..]].concat()),
        _ => None,
    }
}

#[test]
fn commands_exist_with_their_options() {
    let (packages, mut helps) = (packages(), Helps(BTreeMap::new()));
    let (mut faults, mut count) = (Vec::new(), 0);
    let mut fault_of = |command: &str| -> Option<String> {
        let words: Vec<&str> = command
            .split_whitespace()
            .take_while(|word| !matches!(*word, "|" | "#" | ">" | "2>&1"))
            .collect();
        match words[0] {
            "cargo" => fault_of_cargo(&words[1..], &packages, &mut helps),
            "kvasir" | "target/release/kvasir" | "target/debug/kvasir" => helps.fault(&words[1..]),
            program => {
                let script = if program == "python3" {
                    words.iter().skip(1).find(|word| word.ends_with(".py"))?
                } else {
                    &words[0]
                };
                let is_script = [".sh", ".py"].iter().any(|end| script.ends_with(end));
                (is_script && !script.contains(['{', '*']) && !root().join(script).exists())
                    .then(|| format!("there is no {script}"))
            }
        }
    };
    let documents: Vec<PathBuf> =
        files("md").into_iter().filter(|file| !file.ends_with("bench/RESULTS.md")).collect();
    for file in documents {
        for command in commands(&read(&file)) {
            count += 1;
            if let Some(fault) = fault_of(&command) {
                faults.push(format!("{}: `{command}`: {fault}", file.display()));
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
    assert!(count > 100, "{count} commands were found");
    // The check itself.
    for wrong in [
        "kvasir serv",
        "kvasir gateway --no-such-option",
        "cargo test -p no-such-crate",
        "cargo run --release -p bench -- no-such-benchmark",
        "tests/no-such.sh",
    ] {
        assert!(fault_of(wrong).is_some(), "{wrong}");
    }
}

/// Names of the simulation's oracles, in the first column of its table.
fn oracles() -> BTreeSet<String> {
    let text = read(Path::new("tests/simulation/README.md"));
    let table = text.split("| Oracle |").nth(1).expect("the table of oracles");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| Some(row.split('|').nth(1)?.trim().to_owned())).collect()
}

/// Every test and every oracle that a promise names exists.
#[test]
fn promises_name_tests_that_exist() {
    let sources: String = files("rs").iter().map(|file| read(file)).collect();
    let functions: BTreeSet<&str> = sources
        .split("fn ")
        .skip(1)
        .filter_map(|rest| rest.split(|letter: char| !(letter.is_alphanumeric() || letter == '_')).next())
        .collect();
    let text = read(Path::new("tests/PROMISES.md"));
    let named: Vec<&str> = text
        .split('`')
        .skip(1)
        .step_by(2)
        .filter_map(|code| code.split_once(": "))
        .filter(|(place, _)| *place != "simulation")
        .map(|(_, test)| test)
        .filter(|test| {
            test.contains('_') && test.chars().all(|letter| letter.is_alphanumeric() || letter == '_')
        })
        .collect();
    let missing: Vec<&&str> = named.iter().filter(|test| !functions.contains(**test)).collect();
    assert!(missing.is_empty(), "tests that are named and not there: {missing:#?}");
    let oracles = oracles();
    let unknown: Vec<&str> = text
        .split("`simulation: ")
        .skip(1)
        .filter_map(|rest| rest.split('`').next())
        // The text before the table explains the form with `name`.
        .filter(|name| *name != "name" && !oracles.contains(*name))
        .collect();
    assert!(unknown.is_empty() && oracles.len() > 10, "{unknown:?} are none of {oracles:?}");
    assert!(named.len() > 100, "{} tests are named", named.len());
    assert!(!functions.contains("no_such_test_anywhere"));
}
