//! Label and field selectors.

use serde_json::Value;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Requirement {
    Equals(String, String),
    Differs(String, String),
    Exists(String),
    Missing(String),
    OneOf(String, Vec<String>),
}

/// A label selector, like `app=vllm,tier!=test,gpu,!spot,zone in (a, b)`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

impl Selector {
    /// Parses a selector; `None` if the text is none.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut requirements = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            let end = match rest.find(" in (") {
                Some(at) if !rest[..at].contains(',') => rest.find(')')? + 1,
                _ => rest.find(',').unwrap_or(rest.len()),
            };
            requirements.push(requirement(rest[..end].trim())?);
            rest = rest[end..].trim_start_matches(',').trim();
        }
        Some(Self(requirements))
    }

    /// Whether the labels of an object match.
    #[must_use]
    pub fn matches(&self, object: &Value) -> bool {
        let label = |name: &str| object["metadata"]["labels"][name].as_str();
        self.0.iter().all(|requirement| match requirement {
            Requirement::Equals(name, value) => label(name) == Some(value),
            Requirement::Differs(name, value) => label(name) != Some(value),
            Requirement::Exists(name) => label(name).is_some(),
            Requirement::Missing(name) => label(name).is_none(),
            Requirement::OneOf(name, values) => {
                label(name).is_some_and(|label| values.iter().any(|value| value == label))
            }
        })
    }
}

fn requirement(text: &str) -> Option<Requirement> {
    let is_name = |name: &str| {
        !name.is_empty()
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || "-._/".contains(letter))
    };
    let (name, of): (&str, Box<dyn Fn(String) -> Requirement>) =
        if let Some((name, values)) = text.split_once(" in (") {
            let values: Vec<String> =
                values.trim_end_matches(')').split(',').map(|value| value.trim().to_owned()).collect();
            (name, Box::new(move |name| Requirement::OneOf(name, values.clone())))
        } else if let Some((name, value)) = text.split_once("!=") {
            let value = value.trim().to_owned();
            (name, Box::new(move |name| Requirement::Differs(name, value.clone())))
        } else if let Some((name, value)) = text.split_once('=') {
            let value = value.trim_start_matches('=').trim().to_owned();
            (name, Box::new(move |name| Requirement::Equals(name, value.clone())))
        } else if let Some(name) = text.strip_prefix('!') {
            (name, Box::new(Requirement::Missing))
        } else {
            (text, Box::new(Requirement::Exists))
        };
    let name = name.trim();
    is_name(name).then(|| of(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn selectors_match_as_kubectls() {
        let object = json!({"metadata": {"labels": {"app": "vllm", "llm-d.ai/role": "decode"}}});
        for (text, expected) in [
            ("", true),
            ("app=vllm", true),
            ("app==vllm", true),
            ("app=sglang", false),
            ("app!=sglang,llm-d.ai/role=decode", true),
            ("app", true),
            ("!app", false),
            ("!gpu", true),
            ("llm-d.ai/role in (prefill, decode),app=vllm", true),
            ("app=vllm,llm-d.ai/role in (prefill)", false),
        ] {
            assert_eq!(Selector::parse(text).expect(text).matches(&object), expected, "{text}");
        }
        for text in ["=a", "a b", "app in (a", ",="] {
            assert_eq!(Selector::parse(text), None, "{text}");
        }
    }
}
