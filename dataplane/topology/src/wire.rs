//! The text form of a node's description, one fact per line, and its parser.
//!
//! ```text
//! kvasir-node 1
//! host node2
//! boot c7826d08-4481-4f45-8e95-c181da6d210c
//! shared 0:23:/
//! gpu 0000:1b:00.0 numa=0 direct=yes link_mb_s=63015
//! rail mlx5_0:1 layer=InfiniBand address=fe80::5 prefix=64 rate_mbit_s=400000 numa=0 gpus=PIX,SYS
//! tcp 10.0.0.2:7001
//! end
//! ```
//! Unknown kinds of lines and unknown keys are ignored, so that a later version may add some; invalid values
//! of known keys are errors. `end` distinguishes a complete description from a truncated one. Everything has
//! a named limit, because the text comes from a peer.

use std::fmt::Write as _;
use std::str::FromStr;

use crate::description::{DescribedGpu, DescribedRail, NodeDescription};
use crate::error::TopologyError;
use crate::rdma::LinkLayer;

/// Largest description that is read, in bytes.
pub const DESCRIPTION_BYTES_MAX: usize = 64 * 1024;
/// Largest number of GPUs of one node.
pub const GPUS_MAX: usize = 32;
/// Largest number of rails of one node.
pub const RAILS_MAX: usize = 64;
/// Largest number of addresses that one node listens on.
pub const TCP_ADDRESSES_MAX: usize = 32;
const WORD_BYTES_MAX: usize = 128;
const FIRST_LINE: &str = "kvasir-node 1";

/// Whether a text may be a word of a line: printable, without spaces, not too long.
pub(crate) fn is_word(text: &str) -> bool {
    !text.is_empty() && text.len() <= WORD_BYTES_MAX && text.bytes().all(|byte| byte.is_ascii_graphic())
}

impl NodeDescription {
    /// Returns the text form.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, text: &mut String) -> std::fmt::Result {
        writeln!(text, "{FIRST_LINE}\nhost {}", self.hostname)?;
        for (kind, value) in [("boot", &self.boot_id), ("shared", &self.shared_directory_id)] {
            if let Some(value) = value {
                writeln!(text, "{kind} {value}")?;
            }
        }
        for gpu in &self.gpus {
            write!(text, "gpu {} direct={}", gpu.address, if gpu.direct { "yes" } else { "no" })?;
            optional(text, "numa", gpu.numa)?;
            optional(text, "link_mb_s", gpu.link_mb_s)?;
            text.push('\n');
        }
        for rail in &self.rails {
            write!(text, "rail {} layer={} address={}", rail.name, rail.layer.name(), rail.address)?;
            optional(text, "guid", rail.guid.as_ref())?;
            optional(text, "prefix", rail.prefix_bits)?;
            optional(text, "rate_mbit_s", rail.rate_mbit_s)?;
            optional(text, "ceiling_mb_s", rail.ceiling_mb_s)?;
            optional(text, "numa", rail.numa)?;
            if rail.software {
                text.push_str(" software=yes");
            }
            if !rail.gpu_distances.is_empty() {
                let names: Vec<&str> = rail.gpu_distances.iter().map(|distance| distance.name()).collect();
                write!(text, " gpus={}", names.join(","))?;
            }
            text.push('\n');
        }
        for address in &self.tcp_addresses {
            writeln!(text, "tcp {address}")?;
        }
        writeln!(text, "end")
    }

    /// Parses the text form.
    ///
    /// # Errors
    /// The line number and the fault.
    pub fn parse(bytes: &[u8]) -> Result<Self, TopologyError> {
        let fail = |line, problem| Err(TopologyError::Description { line, problem });
        if bytes.len() > DESCRIPTION_BYTES_MAX {
            return fail(1, "longer than a description may be");
        }
        let Ok(text) = str::from_utf8(bytes) else { return fail(1, "not UTF-8") };
        let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
        if lines.next().is_none_or(|(_, line)| line != FIRST_LINE) {
            return fail(1, "does not start with 'kvasir-node 1'");
        }
        let mut description = Self::default();
        for (number, line) in lines {
            if line == "end" {
                return description.finish(number);
            }
            if let Err(problem) = description.line(line) {
                return fail(number, problem);
            }
        }
        fail(text.lines().count(), "the line 'end' is missing")
    }

    fn finish(self, line: usize) -> Result<Self, TopologyError> {
        let fail = |problem| Err(TopologyError::Description { line, problem });
        if self.hostname.is_empty() {
            return fail("the line 'host' is missing");
        }
        if self.rails.iter().any(|rail| rail.gpu_distances.len() != self.gpus.len()) {
            return fail("a rail has not one distance for each GPU");
        }
        Ok(self)
    }

    fn line(&mut self, line: &str) -> Result<(), &'static str> {
        let (kind, rest) = line.split_once(' ').ok_or("a word without a value")?;
        let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let word = || if is_word(name) { Ok(name.to_owned()) } else { Err("not one printable word") };
        match kind {
            "host" => self.hostname = word()?,
            "boot" => self.boot_id = Some(word()?),
            "shared" => self.shared_directory_id = Some(word()?),
            "gpu" => add(&mut self.gpus, parse_gpu(name, rest)?, GPUS_MAX, "too many GPUs")?,
            "rail" => add(&mut self.rails, parse_rail(word()?, rest)?, RAILS_MAX, "too many rails")?,
            "tcp" => add(&mut self.tcp_addresses, word()?, TCP_ADDRESSES_MAX, "too many addresses")?,
            _ => {}
        }
        Ok(())
    }
}

fn optional(text: &mut String, key: &str, value: Option<impl std::fmt::Display>) -> std::fmt::Result {
    value.map_or(Ok(()), |value| write!(text, " {key}={value}"))
}

fn add<T>(list: &mut Vec<T>, item: T, count_max: usize, full: &'static str) -> Result<(), &'static str> {
    if list.len() >= count_max {
        return Err(full);
    }
    list.push(item);
    Ok(())
}

/// Returns the value of a key, if the key is present.
fn value<T: FromStr>(pairs: &str, key: &str, wrong: &'static str) -> Result<Option<T>, &'static str> {
    let found = pairs.split(' ').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
    found.map(|text| text.parse().map_err(|_| wrong)).transpose()
}

fn yes_no(pairs: &str, key: &str) -> Result<bool, &'static str> {
    match value::<String>(pairs, key, "")?.as_deref() {
        Some("yes") => Ok(true),
        Some("no") | None => Ok(false),
        Some(_) => Err("neither yes nor no"),
    }
}

fn parse_gpu(name: &str, pairs: &str) -> Result<DescribedGpu, &'static str> {
    Ok(DescribedGpu {
        address: name.parse().map_err(|()| "not a PCI address")?,
        numa: value(pairs, "numa", "not a NUMA node")?,
        direct: yes_no(pairs, "direct")?,
        link_mb_s: value(pairs, "link_mb_s", "not a bandwidth")?,
    })
}

fn parse_rail(name: String, pairs: &str) -> Result<DescribedRail, &'static str> {
    let layer = match value::<String>(pairs, "layer", "")?.as_deref() {
        Some("InfiniBand") => LinkLayer::InfiniBand,
        Some("Ethernet") => LinkLayer::Ethernet,
        _ => return Err("not a link layer"),
    };
    let guid: Option<String> = value(pairs, "guid", "")?;
    if guid.as_deref().is_some_and(|guid| !is_word(guid)) {
        return Err("not a GUID");
    }
    let distances: Option<String> = value(pairs, "gpus", "")?;
    let distances = distances.as_deref().map(|list| list.split(',').take(GPUS_MAX + 1));
    let distances = distances.into_iter().flatten().map(|name| name.parse().map_err(|()| "not a distance"));
    Ok(DescribedRail {
        name,
        guid,
        layer,
        address: value(pairs, "address", "not an address")?.ok_or("no address")?,
        prefix_bits: value(pairs, "prefix", "not a prefix")?.filter(|&bits| bits <= 128),
        rate_mbit_s: value(pairs, "rate_mbit_s", "not a rate")?,
        ceiling_mb_s: value(pairs, "ceiling_mb_s", "not a bandwidth")?,
        numa: value(pairs, "numa", "not a NUMA node")?,
        software: yes_no(pairs, "software")?,
        gpu_distances: distances.collect::<Result<_, _>>()?,
    })
}
