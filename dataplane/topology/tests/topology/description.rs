//! The text that a node sends of itself.

use dataplane_topology::{DESCRIPTION_BYTES_MAX, NodeDescription, RAILS_MAX, TopologyError};

use crate::fixtures::{dgx, plain_vm, soft_roce, wrong_socket};

#[test]
fn what_is_written_is_read() {
    for machine in [dgx("a"), wrong_socket(), plain_vm(), soft_roce()] {
        let description =
            NodeDescription::of(&machine.read(), vec!["10.0.0.1:7001".to_owned(), "[::1]:7001".to_owned()]);
        assert_eq!(NodeDescription::parse(description.encode().as_bytes()), Ok(description));
    }
}

#[test]
fn wrong_texts_are_refused_with_their_line() {
    let wrong = |text: &str, line, problem| {
        assert_eq!(
            NodeDescription::parse(text.as_bytes()),
            Err(TopologyError::Description { line, problem }),
            "{text}"
        );
    };
    wrong("", 1, "does not start with 'kvasir-node 1'");
    wrong("kvasir-node 2\nhost a\nend\n", 1, "does not start with 'kvasir-node 1'");
    wrong("kvasir-node 1\nhost a\n", 2, "the line 'end' is missing");
    wrong("kvasir-node 1\nend\n", 2, "the line 'host' is missing");
    wrong("kvasir-node 1\nhost a\nhost\nend", 3, "a word without a value");
    wrong("kvasir-node 1\nhost a\u{1b}[0m\nend", 2, "not one printable word");
    wrong("kvasir-node 1\nhost a\ngpu 17:00.9\nend", 3, "not a PCI address");
    wrong("kvasir-node 1\nhost a\nrail x layer=Token address=::1\nend", 3, "not a link layer");
    wrong("kvasir-node 1\nhost a\nrail x layer=Ethernet\nend", 3, "no address");
    wrong(
        "kvasir-node 1\nhost a\nrail x layer=Ethernet address=::1 gpus=PIX\nend",
        4,
        "a rail has not one distance for each GPU",
    );
    let rails = "rail x layer=Ethernet address=::1\n".repeat(RAILS_MAX + 1);
    wrong(&format!("kvasir-node 1\nhost a\n{rails}end"), RAILS_MAX + 3, "too many rails");
    let long = format!("kvasir-node 1\n{}", "x ".repeat(DESCRIPTION_BYTES_MAX));
    wrong(&long, 1, "longer than a description may be");
    assert!(NodeDescription::parse(&[0xff, 0xfe]).is_err());
}

#[test]
fn later_versions_may_add_lines_and_keys() {
    let text = "kvasir-node 1\nhost a\ncolour blue\ngpu 0000:17:00.0 direct=yes heat=9\nend\nrest";
    let description = NodeDescription::parse(text.as_bytes()).expect("tolerant");
    assert_eq!(description.gpus.len(), 1);
}

#[test]
fn mutated_texts_never_panic_and_accepted_ones_come_back() {
    let seed = 0x5eed_0005;
    println!("seed {seed:#x}");
    let mut random = fastrand::Rng::with_seed(seed);
    let text = NodeDescription::of(&dgx("a").read(), vec!["10.0.0.1:7001".to_owned()]).encode().into_bytes();
    let mut accepted = 0;
    for _ in 0..30_000 {
        let mut mutated = text.clone();
        for _ in 0..=random.usize(..4) {
            let at = random.usize(..mutated.len().max(1));
            match random.usize(..5) {
                0 => mutated[at] = random.u8(..),
                1 => mutated[at] ^= 1 << random.usize(..7),
                2 => drop(
                    mutated.drain(at..(at + random.usize(..40)).min(text.len()).max(at).min(mutated.len())),
                ),
                3 => mutated.truncate(at.max(1)),
                _ => {
                    let end = (at + random.usize(..60)).min(mutated.len());
                    let part = mutated[at..end].to_vec();
                    let to = random.usize(..mutated.len().max(1));
                    mutated.splice(to..to, part);
                }
            }
            if mutated.is_empty() {
                mutated.push(b'k');
            }
        }
        if let Ok(description) = NodeDescription::parse(&mutated) {
            accepted += 1;
            let again = NodeDescription::parse(description.encode().as_bytes());
            assert_eq!(again, Ok(description), "{}", String::from_utf8_lossy(&mutated));
        }
    }
    assert!(
        (300..27_000).contains(&accepted),
        "{accepted} of 30000 accepted: the test does not test both sides"
    );
}
