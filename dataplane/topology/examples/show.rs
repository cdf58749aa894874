//! Prints what the crate sees, of this machine or of a made one:
//! `show doctor|explain A B|svg A B|describe [--machine dgx|wrong-socket|two-rails|vm|rxe] [--to dgx]`.

#[path = "../tests/topology/fixtures.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod fixtures;

use std::path::Path;

use dataplane_topology::{
    NodeDescription, NodeRequirements, Place, Topology, TopologyError, Transports, render,
};

fn machine(name: &str) -> Option<Topology> {
    let machine = match name {
        "dgx" => fixtures::dgx("fixture"),
        "wrong-socket" => fixtures::wrong_socket(),
        "two-rails" => fixtures::two_rails(),
        "vm" => fixtures::plain_vm(),
        "rxe" => fixtures::soft_roce(),
        _ => return None,
    };
    Some(machine.read())
}

fn main() -> Result<(), TopologyError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        machine(arguments.get(at + 1)?)
    };
    let topology = option("--machine").unwrap_or_else(|| Topology::read(Path::new("/")));
    let other = option("--to").map(|other| NodeDescription {
        hostname: "node2".to_owned(),
        boot_id: Some("other".to_owned()),
        ..NodeDescription::of(&other, vec!["10.0.0.2:7001".to_owned()])
    });
    let others: Vec<NodeDescription> = other.into_iter().collect();
    let needs = NodeRequirements::default();
    let word = |index: usize| arguments.get(index).map_or("host", String::as_str);
    let explain = || {
        let (from, to) = (word(1).parse::<Place>()?, word(2).parse::<Place>()?);
        render::explain(&topology, &others, &from, &to, Transports::default(), needs)
    };
    match word(0) {
        "explain" => print!("{}", explain()?.text),
        "svg" => print!("{}", explain()?.svg),
        "describe" => print!("{}", NodeDescription::of(&topology, Vec::new()).encode()),
        _ => print!("{}", render::doctor(&topology, &needs)),
    }
    Ok(())
}
