//! Chat templates, rendered as `transformers` renders them.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use serde::Serialize;

use crate::TokensError;
use crate::conversation::TemplateFeatures;
use crate::json_filter::to_json;

const NAME: &str = "chat";

/// A compiled chat template. Usable from any thread.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    pub(crate) features: TemplateFeatures,
}

impl ChatTemplate {
    /// Compiles a template.
    pub fn new(source: &str) -> Result<Self, TokensError> {
        Self::compile(source).map_err(|error| TokensError::Template(error.to_string()))
    }

    fn compile(source: &str) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
            jiff::fmt::strtime::format(&format, &jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC))
                .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
        });
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, without_generation_tags(source))?;
        Ok(Self { environment, source: source.to_owned(), features: TemplateFeatures::of(source) })
    }

    /// The template's text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation. `context` holds `messages`, `add_generation_prompt`, `bos_token`, `tools`, ….
    pub fn render(&self, context: &impl Serialize) -> Result<String, TokensError> {
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from(Serde(context))))
            .map_err(|error| {
                TokensError::Template(error.detail().map_or_else(|| error.to_string(), str::to_owned))
            })
    }
}

/// `{% generation %}` marks what the assistant wrote, for training. It becomes a condition that always holds:
/// whitespace control around it then stays that of a block tag.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(end) = rest[start..].find("%}").map(|at| start + at + 2) else { break };
        let inner = &rest[start + 2..end - 2];
        let (left, body) = split_mark(inner, inner.chars().next(), 1, 0);
        let (right, body) = split_mark(body, body.chars().last(), 0, 1);
        out.push_str(&rest[..start]);
        match body.trim() {
            "generation" => out.push_str(&format!("{{%{left} if true {right}%}}")),
            "endgeneration" => out.push_str(&format!("{{%{left} endif {right}%}}")),
            _ => out.push_str(&rest[start..end]),
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

fn split_mark(body: &str, mark: Option<char>, from_start: usize, from_end: usize) -> (&'static str, &str) {
    let without = || body.get(from_start..body.len().saturating_sub(from_end)).unwrap_or_default();
    match mark {
        Some('-') => ("-", without()),
        Some('+') => ("+", without()),
        _ => ("", body),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    fn render(source: &str, context: &Json) -> Result<String, TokensError> {
        ChatTemplate::new(source).and_then(|template| template.render(context))
    }

    #[test]
    fn python_habits_of_templates_work() {
        let context =
            json!({"messages": [{"role": "user", "content": " hi "}], "tools": [{"b": 1, "a": "é<"}]});
        for (source, expected) in [
            ("{% for m in messages %}<{{ m['role'] }}>{{ m.content.strip() }}{% endfor %}", "<user>hi"),
            ("{{ tools | tojson }}", r#"[{"b": 1, "a": "é<"}]"#),
            ("{{ tools[0] | tojson(indent=2) }}", "{\n  \"b\": 1,\n  \"a\": \"é<\"\n}"),
            (
                "{% set ns = namespace(x=1) %}{% for m in messages %}{% set ns.x = 5 %}{% endfor %}{{ ns.x }}",
                "5",
            ),
            ("{{ messages[::-1][0].role }}{{ nothing }}", "user"),
            ("a {%- generation -%} x {%- endgeneration %}b", "axb"),
            ("{{ strftime_now('%Y') | length }}", "4"),
        ] {
            assert_eq!(render(source, &context).expect(source), expected, "{source}");
        }
    }

    #[test]
    fn a_template_can_refuse_with_its_own_words() {
        let error = render("{{ raise_exception('roles must alternate') }}", &json!({})).expect_err("refuses");
        assert_eq!(error.to_string(), "chat template: roles must alternate");
    }
}
