//! Labels and annotations that describe a worker, by the conventions of the field.
//!
//! | Meaning | Names, the first that is set counts | Source |
//! | --- | --- | --- |
//! | role | `kvasir/role`, `llm-d.ai/role`, `role-name` | ours; llm-d's router (`prefill`, `decode`, `both`, `prefill-decode`); AIBrix |
//! | model | `kvasir/model`, `model.aibrix.ai/name`, `model` | ours; AIBrix; vLLM's production-stack |
//! | pool | `kvasir/pool` | ours |
//! | generation: prefill and decode workers of two of them are not paired | `kvasir/generation` | ours |
//! | ports, one for each data-parallel rank | `kvasir/port`, `llm-d.ai/active-ports`, `smg.ai/worker-ports`, `model.aibrix.ai/port` | ours; llm-d; SGLang's model gateway; AIBrix |
//! | asleep | `sleeping=true` | production-stack |
//!
//! A pod with a role that Kvasir does not have (llm-d's `encode`) is no worker of a gateway.

use std::collections::BTreeMap;

use crate::endpoint::Role;

const ROLE: [&str; 3] = ["kvasir/role", "llm-d.ai/role", "role-name"];
const MODEL: [&str; 3] = ["kvasir/model", "model.aibrix.ai/name", "model"];
const POOL: [&str; 1] = ["kvasir/pool"];
const GENERATION: [&str; 1] = ["kvasir/generation"];
const PORTS: [&str; 4] =
    ["kvasir/port", "llm-d.ai/active-ports", "smg.ai/worker-ports", "model.aibrix.ai/port"];

/// Most ranks of one pod, which has no more devices.
const PORTS_MAX: usize = 16;

/// Labels and annotations of an object, labels first.
#[derive(Debug, Clone, Copy)]
pub struct Labels<'a>(pub [&'a BTreeMap<String, String>; 2]);

impl<'a> Labels<'a> {
    fn first(&self, names: &[&str]) -> Option<&'a str> {
        let of = |name: &&str| self.0.iter().find_map(|map| map.get(*name));
        names.iter().find_map(of).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns the worker's role; an error is the name of a role that a gateway does not use.
    pub fn role(&self) -> Result<Option<Role>, &'a str> {
        match self.first(&ROLE) {
            None => Ok(None),
            Some(name) => Role::from_name(name).map(Some).ok_or(name),
        }
    }

    /// Returns the name of the model that the worker serves.
    #[must_use]
    pub fn model(&self) -> Option<String> {
        self.first(&MODEL).map(str::to_owned)
    }

    /// Returns the name of the worker's pool.
    #[must_use]
    pub fn pool(&self) -> Option<String> {
        self.first(&POOL).map(str::to_owned)
    }

    /// Returns the version of the deployment.
    #[must_use]
    pub fn generation(&self) -> Option<String> {
        self.first(&GENERATION).map(str::to_owned)
    }

    /// Returns the ports of the worker, one for each rank; empty if none is given. An error is the text that
    /// cannot be read, or has more than 16 ports.
    pub fn ports(&self) -> Result<Vec<u16>, &'a str> {
        let Some(text) = self.first(&PORTS) else { return Ok(Vec::new()) };
        let ports = text.split(',').map(|port| port.trim().parse().ok().filter(|port| *port > 0));
        ports.collect::<Option<Vec<u16>>>().filter(|ports| ports.len() <= PORTS_MAX).ok_or(text)
    }

    /// Whether the worker's engine has been put to sleep.
    #[must_use]
    pub fn is_sleeping(&self) -> bool {
        self.first(&["sleeping"]) == Some("true")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn conventions_of_the_field_are_understood_and_our_own_names_count_first() {
        let labels = map(&[("llm-d.ai/role", "decode"), ("model", "llama"), ("sleeping", "true")]);
        let annotations = map(&[("llm-d.ai/active-ports", "8000, 8001"), ("kvasir/role", "prefill")]);
        let all = Labels([&labels, &annotations]);
        assert_eq!(all.role(), Ok(Some(Role::Prefill)));
        assert_eq!((all.model().as_deref(), all.pool()), (Some("llama"), None));
        assert_eq!(all.ports(), Ok(vec![8000, 8001]));
        assert!(all.is_sleeping());
        let empty = map(&[]);
        let none = Labels([&empty, &empty]);
        assert_eq!((none.role(), none.ports(), none.is_sleeping()), (Ok(None), Ok(Vec::new()), false));
    }

    #[test]
    fn values_that_mean_nothing_here_are_named() {
        let (labels, empty) = (map(&[("llm-d.ai/role", "encode"), ("kvasir/port", "80,none")]), map(&[]));
        let labels = Labels([&labels, &empty]);
        assert_eq!(labels.role(), Err("encode"));
        assert_eq!(labels.ports(), Err("80,none"));
        let many = (1..=17).map(|port| port.to_string()).collect::<Vec<_>>().join(",");
        let labels = map(&[("kvasir/port", &many)]);
        assert_eq!(Labels([&labels, &empty]).ports(), Err(many.as_str()));
    }
}
