//! Request bodies, as far as a mock needs them. Unknown fields are ignored, as the engines ignore them.
//!
//! Hot path: texts are borrowed from the body unless they have escapes.

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// A text; null is empty, and content parts are joined with newlines as vLLM joins them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Text<'a>(pub(crate) Cow<'a, str>);

#[derive(serde::Deserialize)]
struct Part<'a> {
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a valid string")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Owned(text.to_owned())))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Text<'de>, E> {
        Ok(Text::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Text<'de>, A::Error> {
        let mut texts: Vec<Cow<'de, str>> = Vec::new();
        while let Some(part) = parts.next_element::<Part<'de>>()? {
            texts.extend(part.text.map(|text| text.0));
        }
        Ok(Text(Cow::Owned(texts.join("\n"))))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextVisitor)
    }
}

/// One message of a conversation.
#[derive(Debug, Clone, Default, PartialEq, serde::Deserialize)]
pub(crate) struct Message<'a> {
    #[serde(borrow)]
    pub(crate) role: Text<'a>,
    #[serde(borrow, default)]
    pub(crate) content: Text<'a>,
    #[serde(default)]
    pub(crate) tool_calls: Option<Value>,
    #[serde(default)]
    pub(crate) tool_call_id: Option<Value>,
    #[serde(default)]
    pub(crate) name: Option<Value>,
}

/// One or several texts or lists of token ids.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Prompts<'a>(pub(crate) Vec<Prompt<'a>>);

/// A prompt of `/v1/completions`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Prompt<'a> {
    Text(Cow<'a, str>),
    Tokens(Vec<u32>),
}

struct PromptsVisitor;

/// An element of an array of prompts.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Element {
    Token(u32),
    Text(String),
    Tokens(Vec<u32>),
}

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a string, token ids, or a list of either")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Prompts<'de>, E> {
        Ok(Prompts(vec![Prompt::Text(Cow::Borrowed(text))]))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompts<'de>, E> {
        Ok(Prompts(vec![Prompt::Text(Cow::Owned(text.to_owned()))]))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Prompts<'de>, E> {
        Ok(Prompts::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Prompts<'de>, A::Error> {
        let mut prompts = Vec::new();
        match items.next_element::<Element>()? {
            None => {}
            Some(Element::Token(first)) => {
                let mut tokens = vec![first];
                while let Some(token) = items.next_element()? {
                    tokens.push(token);
                }
                prompts.push(Prompt::Tokens(tokens));
            }
            Some(first) => {
                let mut next = Some(first);
                while let Some(element) = next {
                    prompts.push(match element {
                        Element::Text(text) => Prompt::Text(Cow::Owned(text)),
                        Element::Tokens(tokens) => Prompt::Tokens(tokens),
                        Element::Token(_) => return Err(de::Error::custom("prompts of several kinds")),
                    });
                    next = items.next_element()?;
                }
            }
        }
        Ok(Prompts(prompts))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Prompts<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

/// One or several stop strings.
#[derive(Debug, Clone, Default, PartialEq, serde::Deserialize)]
#[serde(untagged)]
pub(crate) enum Stops {
    #[default]
    None,
    One(String),
    Several(Vec<String>),
}

impl Stops {
    pub(crate) fn into_vec(self) -> Vec<String> {
        let stops = match self {
            Self::None => Vec::new(),
            Self::One(stop) => vec![stop],
            Self::Several(stops) => stops,
        };
        stops.into_iter().filter(|stop| !stop.is_empty()).collect()
    }
}

/// `stream_options`.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Deserialize)]
pub(crate) struct StreamOptions {
    #[serde(default)]
    pub(crate) include_usage: Option<bool>,
    #[serde(default)]
    pub(crate) continuous_usage_stats: Option<bool>,
}

/// True, or how many: completions ask for log-probabilities by number, chats by flag.
#[derive(Debug, Clone, Copy, PartialEq, serde::Deserialize)]
#[serde(untagged)]
pub(crate) enum Logprobs {
    Flag(bool),
    Top(u32),
}

/// A bootstrap port or room: one, or one for each prompt of a batch.
#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
#[serde(untagged)]
pub(crate) enum BootstrapRooms {
    One(i64),
    Several(Vec<Option<i64>>),
}

macro_rules! body {
    ($($(#[$attribute:meta])* $name:ident: $kind:ty,)*) => {
        /// The body of `/v1/completions` and `/v1/chat/completions`; absent and null are the same.
        #[derive(Debug, Clone, Default, PartialEq)]
        pub(crate) struct Body<'a> {
            $($(#[$attribute])* pub(crate) $name: Option<$kind>,)*
        }

        struct BodyVisitor;

        impl<'de> Visitor<'de> for BodyVisitor {
            type Value = Body<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a valid dictionary")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body<'de>, A::Error> {
                let mut body = Body::default();
                while let Some(Text(key)) = map.next_key::<Text<'de>>()? {
                    match key.as_ref() {
                        $(stringify!($name) => {
                            body.$name = map.next_value().map_err(|error: A::Error| {
                                de::Error::custom(format_args!("`{}`: {error}", stringify!($name)))
                            })?;
                        })*
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(body)
            }
        }
    };
}

// Borrowed texts in an `Option` and errors that name their field: the derived form has neither.
body! {
    model: Text<'a>,
    messages: Vec<Message<'a>>,
    prompt: Prompts<'a>,
    max_tokens: i64,
    max_completion_tokens: i64,
    min_tokens: u32,
    temperature: f64,
    n: u32,
    stream: bool,
    stream_options: StreamOptions,
    stop: Stops,
    include_stop_str_in_output: bool,
    stop_token_ids: Vec<u32>,
    ignore_eos: bool,
    logprobs: Logprobs,
    top_logprobs: u32,
    echo: bool,
    return_token_ids: bool,
    return_tokens_as_token_ids: bool,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template_kwargs: serde_json::Map<String, Value>,
    tools: Value,
    tool_choice: Value,
    response_format: Value,
    structured_outputs: Value,
    guided_json: Value,
    cache_salt: Text<'a>,
    request_id: Text<'a>,
    kv_transfer_params: Value,
    bootstrap_host: Value,
    bootstrap_room: BootstrapRooms,
}

impl<'de> Deserialize<'de> for Body<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(BodyVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_read_leniently_and_complaints_name_the_field() {
        let body: Body<'_> = serde_json::from_str(
            r#"{"model":null,"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text",
                "text":"b"}],"x":1},{"role":"assistant","content":null}],"stop":"z","logprobs":true,"foo":[1]}"#,
        )
        .expect("reads");
        let messages = body.messages.expect("messages");
        assert_eq!((messages[0].content.0.as_ref(), messages[1].content.0.as_ref()), ("a\nb", ""));
        assert_eq!((body.model, body.logprobs), (None, Some(Logprobs::Flag(true))));
        let prompts = |json: &'static str| serde_json::from_str::<Prompts<'_>>(json).map(|prompts| prompts.0);
        assert_eq!(prompts("[1,2]").expect("ids"), [Prompt::Tokens(vec![1, 2])]);
        assert_eq!(prompts("[[1],[2,3]]").expect("lists").len(), 2);
        assert_eq!(prompts(r#"["a","b"]"#).expect("texts").len(), 2);
        assert!(prompts(r#"["a",1]"#).is_err());
        let error = serde_json::from_str::<Body<'_>>(r#"{"max_tokens":"x"}"#).expect_err("refused");
        assert!(error.to_string().contains("`max_tokens`"), "{error}");
    }
}
