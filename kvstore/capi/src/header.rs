//! Test of the configuration in the header's comment: its text is parsed and compared with the product's reference.

use crate::config::{DeviceSettings, RdmaSettings, Settings, TransferSettings};

const HEADER: &str = include_str!("../include/kvasir_kv.h");
const REFERENCE: &str = include_str!("../../../control/config/REFERENCE.md");

/// The configuration in the header's comment.
fn defaults() -> String {
    let lines = HEADER.lines().skip_while(|line| line.trim() != "*   [store]");
    let lines = lines.map_while(|line| line.trim().strip_prefix("*   "));
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn the_header_has_the_defaults_and_all_keys() {
    let text = defaults();
    assert_eq!(Settings::parse(&text).expect("valid"), Settings::default());
    let table: toml::Table = text.parse().expect("valid");
    let keys: Vec<(&str, usize)> = table
        .iter()
        .map(|(section, keys)| (section.as_str(), keys.as_table().map_or(0, toml::Table::len)))
        .collect();
    let mut expected = [
        ("store", 1),
        ("host_tier", 8),
        ("disk_tier", 11),
        ("remote_tier", 6),
        ("object_tier", 10),
        ("queue", 3),
    ];
    expected.sort_unstable();
    assert_eq!(keys, expected, "a key that the header does not have, or one too many");
}

#[test]
fn the_header_has_the_defaults_of_a_device() {
    let lines = HEADER.lines().map(str::trim).skip_while(|line| *line != "*     [device]");
    let lines = lines.map_while(|line| line.strip_prefix("*   "));
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    assert_eq!(
        text.matches(" = ").count(),
        4,
        "a key that the library does not have, or one too few: {text}"
    );
    assert_eq!(Settings::parse(&text).expect("valid").device, Some(DeviceSettings::default()));
    assert_eq!(Settings::default().device, None, "no driver is looked for without the section");
}

#[test]
fn the_header_has_the_defaults_of_hand_offs() {
    let lines = HEADER.lines().map(str::trim).skip_while(|line| *line != "*       [transfer]");
    let lines = lines.map_while(|line| line.strip_prefix("*       "));
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    assert_eq!(
        text.matches(" = ").count(),
        22,
        "a key that the library does not have, or one too few: {text}"
    );
    let settings = Settings::parse(&text).expect("valid");
    assert_eq!(settings.transfer, Some(TransferSettings::default()));
    assert_eq!(settings.rdma, RdmaSettings::default());
    assert_eq!(Settings::default().transfer, None, "nothing listens without the section");
}

#[test]
fn sections_and_defaults_are_the_products() {
    let table: toml::Table = defaults().parse().expect("valid");
    let mut compared = 0;
    for (section, keys) in table.iter().filter(|(section, _)| *section != "queue") {
        let (_, rows) = REFERENCE.split_once(&format!("\n## `[{section}]`\n")).expect(section);
        let rows = rows.split("\n## ").next().unwrap_or_default();
        // The product has one secret for all network traffic, in [transfer].
        let is_own = |key: &str| (section.as_str(), key) == ("remote_tier", "secret_file");
        for (key, value) in keys.as_table().expect("a section").iter().filter(|(key, _)| !is_own(key)) {
            let row = rows.lines().find(|line| line.starts_with(&format!("| `{key}` |"))).expect(key);
            let default = row.split(" | ").nth(2).expect("a default").trim_matches('`');
            // A worker's tier is one of many; a store of this library is its engine's only one.
            if (section.as_str(), key.as_str()) != ("host_tier", "capacity") {
                assert_eq!(value.to_string(), default, "{section}.{key}");
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 34, "keys in common");
}
