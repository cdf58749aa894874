//! Files that list workers.
//!
//! | Ending | Form |
//! | --- | --- |
//! | `.toml` | `[[worker]]` tables with `url` and, optionally, `role`, `pool`, `model`, `uid`, `generation`, `draining` |
//! | `.yaml`, `.yml`, `.json` | llm-d's `endpoints:` list with `address`, `port` and, optionally, `name` and `labels` (its `docs/discovery.md`); other fields are not looked at |

use std::collections::{BTreeMap, HashSet};

use serde::Deserialize;

use crate::endpoint::{Endpoint, EndpointState, Role, url_of};
use crate::labels::Labels;

/// Format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Toml,
    Yaml,
}

impl Format {
    /// Returns the format of a file with this extension.
    pub(crate) fn of_ending(ending: &str) -> Option<Self> {
        match ending {
            "toml" => Some(Self::Toml),
            "yaml" | "yml" | "json" => Some(Self::Yaml),
            _ => None,
        }
    }

    /// Parses the workers of a file; an error names the wrong line or entry.
    pub(crate) fn parse(self, text: &str) -> Result<Vec<Endpoint>, String> {
        let endpoints = match self {
            Self::Toml => from_toml(text)?,
            Self::Yaml => from_yaml(text)?,
        };
        let mut seen = HashSet::new();
        match endpoints.iter().find(|endpoint| !seen.insert(endpoint.address())) {
            Some(twice) => Err(format!("a worker is named twice: {}", twice.url)),
            None => Ok(endpoints),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TomlFile {
    #[serde(default)]
    worker: Vec<TomlWorker>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TomlWorker {
    url: String,
    role: Option<String>,
    pool: Option<String>,
    model: Option<String>,
    uid: Option<String>,
    generation: Option<String>,
    #[serde(default)]
    draining: bool,
}

fn from_toml(text: &str) -> Result<Vec<Endpoint>, String> {
    let file: TomlFile = toml::from_str(text).map_err(|error| {
        let line =
            error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        format!("line {line}: {}", error.message())
    })?;
    let endpoint = |worker: TomlWorker| {
        let role = worker.role.as_deref().filter(|role| !role.is_empty()).map(|name| {
            let role = Role::from_name(name);
            role.ok_or_else(|| format!("{}: a role is prefill, decode or both, not {name:?}", worker.url))
        });
        Ok(Endpoint {
            uid: worker.uid,
            role: role.transpose()?,
            pool: worker.pool,
            model: worker.model,
            generation: worker.generation.filter(|generation| !generation.is_empty()),
            state: if worker.draining { EndpointState::Draining } else { EndpointState::Ready },
            ..Endpoint::new(worker.url)
        })
    };
    file.worker.into_iter().map(endpoint).collect()
}

#[derive(Deserialize)]
struct YamlFile {
    endpoints: Vec<YamlEndpoint>,
}

#[derive(Deserialize)]
struct YamlEndpoint {
    #[serde(default)]
    name: String,
    address: String,
    port: Port,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

/// Port as a string, which llm-d writes, or as a number.
#[derive(Deserialize)]
#[serde(untagged)]
enum Port {
    Number(u16),
    Text(String),
}

fn from_yaml(text: &str) -> Result<Vec<Endpoint>, String> {
    let file: YamlFile = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    let mut endpoints = Vec::with_capacity(file.endpoints.len());
    for YamlEndpoint { name, address, port, labels } in file.endpoints {
        let of = |problem: String| format!("endpoint {name:?} at {address}: {problem}");
        let port = match port {
            Port::Number(port) => Some(port),
            Port::Text(text) => text.parse().ok(),
        };
        let port =
            port.filter(|port| *port > 0).ok_or_else(|| of("its port is not 1 to 65535".to_owned()))?;
        let annotations = BTreeMap::new();
        let labels = Labels([&labels, &annotations]);
        // A role that a gateway does not use (llm-d's `encode`) is no mistake.
        let Ok(role) = labels.role() else { continue };
        endpoints.push(Endpoint {
            role,
            pool: labels.pool(),
            model: labels.model(),
            generation: labels.generation(),
            state: if labels.is_sleeping() { EndpointState::NotReady } else { EndpointState::Ready },
            ..Endpoint::new(url_of("http", &address, port))
        });
    }
    Ok(endpoints)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn toml_lists_workers() {
        let text = "[[worker]]\nurl = \"http://a:1\"\nrole = \"prefill\"\npool = \"p\"\nmodel = \"m\"\nuid = \"u\"\n\
                    generation = \"2\"\ndraining = true\n\n[[worker]]\nurl = \"http://b:1\"\n";
        let expected = Endpoint {
            url: "http://a:1".to_owned(),
            uid: Some("u".to_owned()),
            role: Some(Role::Prefill),
            pool: Some("p".to_owned()),
            model: Some("m".to_owned()),
            generation: Some("2".to_owned()),
            state: EndpointState::Draining,
        };
        assert_eq!(Format::Toml.parse(text), Ok(vec![expected, Endpoint::new("http://b:1")]));
        assert_eq!(Format::Toml.parse(""), Ok(Vec::new()));
    }

    #[test]
    fn llm_ds_endpoints_are_read() {
        let text = "endpoints:\n- name: decode-0\n  namespace: default\n  address: 10.0.0.1\n  port: \"8000\"\n  labels:\n    \
                    llm-d.ai/role: decode\n- address: fd00::1\n  port: 8001\n";
        let first = Endpoint { role: Some(Role::Decode), ..Endpoint::new("http://10.0.0.1:8000") };
        assert_eq!(Format::Yaml.parse(text), Ok(vec![first.clone(), Endpoint::new("http://[fd00::1]:8001")]));
        let json = "{\"endpoints\": [{\"address\": \"10.0.0.1\", \"port\": \"8000\", \"labels\": {\"llm-d.ai/role\": \"decode\"}}]}";
        assert_eq!(Format::of_ending("json").expect("a form").parse(json), Ok(vec![first]));
    }

    #[test]
    fn workers_that_only_encode_are_left_out() {
        let text =
            "endpoints:\n- {address: a, port: 1, labels: {llm-d.ai/role: encode}}\n- {address: b, port: 1}\n";
        assert_eq!(Format::Yaml.parse(text), Ok(vec![Endpoint::new("http://b:1")]));
    }

    #[test]
    fn mistakes_name_their_place() {
        for (format, text, part) in [
            (Format::Toml, "[[worker]]\nurl = \"http://a:1\"\nrol = \"both\"\n", "line 3"),
            (Format::Toml, "[[worker]]\nrole = \"both\"\n", "url"),
            (Format::Toml, "[[worker]]\nurl = \"http://a:1\"\nrole = \"boss\"\n", "\"boss\""),
            (Format::Toml, "[[worker]]\nurl = \"http://a:1\"\n[[worker]]\nurl = \"http://A:1/\"\n", "twice"),
            (Format::Yaml, "endpoints:\n- address: a\n  port: none\n", "port"),
            (Format::Yaml, "endpoints:\n- address: a\n  port: 0\n", "port"),
            (Format::Yaml, "endpoints:\n- port: 1\n", "address"),
            (Format::Yaml, "endpoints: [", "line"),
        ] {
            let error = format.parse(text).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused() {
        let seeds = [
            "[[worker]]\nurl = \"http://a:1\"\n",
            "endpoints:\n- address: a\n  port: \"1\"\n  labels: {a: b}\n",
        ];
        for (seed, format) in seeds.into_iter().zip([Format::Toml, Format::Yaml]) {
            for cut in 0..seed.len() {
                for letter in ['\0', '[', '{', '&', '*', '!', '"', '\n', ':', '-', '9'] {
                    let text = format!("{}{letter}{}", &seed[..cut], &seed[cut + 1..]);
                    // Success and error are both valid results; a panic is not.
                    drop(format.parse(&text));
                }
                drop(format.parse(&seed[..cut]));
            }
        }
    }
}
