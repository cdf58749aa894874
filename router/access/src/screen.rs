//! Refuses contents of a client's body that endanger engines: fields, variables of the chat template, and
//! parts of messages.
//!
//! A body may have unknown fields, so only known places are checked: the fields of [`BODY_FIELDS`] that are
//! refused, `chat_template_kwargs`, and in `messages` and `input` the parts of their contents. Texts are
//! skipped unparsed. So the cost is one or two scans of the conversation, and at most [`CHECKED_ITEMS_MAX`]
//! items are checked. A refused field is named by its path, rather than left out: an answer that ignored an
//! image or a template would be a wrong answer.

use std::borrow::Cow;
use std::fmt;

use router_openai::{Entries, Entry};

use crate::body::BODY_FIELDS;
use crate::headers::Decision;
use crate::media::MediaPolicy;

/// Fields of a body by which a client changes its chat template.
pub const TEMPLATE_FIELDS: [&str; 3] = ["chat_template", TEMPLATE_VARIABLES, "documents"];
const TEMPLATE_VARIABLES: &str = "chat_template_kwargs";

/// Fields of a body that hold messages or items.
pub const CONVERSATIONS: [&str; 2] = ["messages", "input"];
/// Fields of a body whose texts, or images, are ranked or compared.
pub const RANKED: [&str; 9] =
    ["query", "documents", "queries", "items", "text_1", "text_2", "data_1", "data_2", "input"];

/// Largest number of messages, parts and their fields that are checked in a request; more are refused.
const CHECKED_ITEMS_MAX: usize = 1 << 16;
/// Nesting depth of contents in contents: a message's, a part's, and one to spare.
const DEPTH_MAX: usize = 3;
/// Longest value of a template's variable.
const VARIABLE_BYTES_MAX: usize = 64;
/// Characters of a client's own name that are shown.
const SHOWN_MAX: usize = 64;

/// Fields of a part that contain media: a URL, or an object or array with URLs or data.
const MEDIA: [&str; 8] =
    ["image_url", "video_url", "audio_url", "image", "video", "audio", "input_audio", "source"];
/// Fields of a part that contain tensors, which engines unpack with code that was not made for untrusted
/// bytes.
const EMBEDDINGS: [&str; 4] = ["image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"];

/// Reason why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScreenError {
    /// Path of the field.
    pub param: String,
    /// Description of the problem, for people.
    pub message: String,
}

/// Exceptions from the checks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Screen {
    /// Fields that pass although they are listed, also in parts.
    pub allowed: Vec<String>,
    /// Variables of the chat template that a client may set, to a short value.
    pub template_variables: Vec<String>,
    /// Policy for images, sounds and videos.
    pub media: MediaPolicy,
}

impl Screen {
    /// Checks a parsed body by the JSON text of its fields, of which `contents` may hold media; `field`
    /// returns `None` for an absent or null one.
    ///
    /// # Errors
    ///
    /// The first refused field.
    pub fn check<'a>(
        &self,
        contents: &[&str],
        field: impl Fn(&str) -> Option<&'a str>,
    ) -> Result<(), ScreenError> {
        for &(name, decision, why) in &BODY_FIELDS {
            let is_refused = decision == Decision::Refuse && !contents.contains(&name) && !self.allows(name);
            if is_refused && field(name).is_some() {
                return Err(Path::root(name).objection(format_args!("is not taken from clients: {why}")));
            }
        }
        if !self.allows(TEMPLATE_VARIABLES)
            && let Some(raw) = field(TEMPLATE_VARIABLES)
        {
            self.variables(raw)?;
        }
        let mut walk = Walk { screen: self, looked_at: 0, media: 0 };
        for &name in contents {
            // Texts and token ids have no parts.
            if let Some(raw) = field(name).filter(|raw| has_objects(raw)) {
                walk.list(&Path::root(name), raw, DEPTH_MAX)?;
            }
        }
        Ok(())
    }

    fn allows(&self, name: &str) -> bool {
        self.allowed.iter().any(|allowed| allowed == name)
    }

    fn variables(&self, raw: &str) -> Result<(), ScreenError> {
        let root = Path::root(TEMPLATE_VARIABLES);
        each(raw, |place, value| {
            let PathStep::Member(name) = place else { return Ok(()) };
            let path = root.under(place);
            if !self.template_variables.iter().any(|known| known == name) {
                return Err(path.objection("is no variable of the chat template that clients may set here"));
            }
            if value.starts_with(['{', '[']) || value.len() > VARIABLE_BYTES_MAX {
                return Err(path.objection("must be a flag, a number or a short text"));
            }
            Ok(())
        })
    }
}

fn has_objects(raw: &str) -> bool {
    raw.starts_with(['[', '{']) && raw.contains('{')
}

/// A check of one body.
struct Walk<'a> {
    screen: &'a Screen,
    looked_at: usize,
    media: usize,
}

impl Walk<'_> {
    /// Checks messages, items or parts.
    fn list(&mut self, path: &Path<'_>, raw: &str, depth: usize) -> Result<(), ScreenError> {
        if raw.starts_with('{') {
            return self.part(path, raw, depth);
        }
        if !raw.starts_with('[') {
            return Ok(());
        }
        each(raw, |place, value| {
            self.look(path)?;
            self.part(&path.under(place), value, depth)
        })
    }

    /// Checks a message or a part: both may hold contents, as may a list of parts in place of one.
    fn part(&mut self, path: &Path<'_>, raw: &str, depth: usize) -> Result<(), ScreenError> {
        if raw.starts_with('[') && depth > 0 {
            return self.list(path, raw, depth - 1);
        }
        if !raw.starts_with('{') {
            return Ok(());
        }
        each(raw, |place, value| {
            self.look(path)?;
            let PathStep::Member(name) = place else { return Ok(()) };
            let below = path.under(place);
            match name {
                _ if value == "null" => Ok(()),
                "content" | "output" if depth > 0 => self.list(&below, value, depth - 1),
                // Elsewhere `source` is a text.
                "source" if !value.starts_with('{') => Ok(()),
                _ if MEDIA.contains(&name) => self.media(&below, value),
                _ if EMBEDDINGS.contains(&name) && !self.screen.allows(name) => {
                    Err(below.objection("is not taken from clients: a tensor that the engine would unpack"))
                }
                _ => Ok(()),
            }
        })
    }

    fn media(&mut self, path: &Path<'_>, raw: &str) -> Result<(), ScreenError> {
        match raw.as_bytes().first() {
            Some(b'"') => self.url(path, raw),
            Some(b'{' | b'[') => each(raw, |place, value| {
                self.look(path)?;
                let below = path.under(place);
                match place {
                    _ if !value.starts_with('"') => Ok(()),
                    PathStep::Member("url") | PathStep::Element(_) => self.url(&below, value),
                    PathStep::Member("data") => {
                        self.count(&below)?;
                        self.screen.media.check_data(value.len()).map_err(|why| below.objection(why))
                    }
                    PathStep::Member(_) => Ok(()),
                }
            }),
            _ => Ok(()),
        }
    }

    fn url(&mut self, path: &Path<'_>, raw: &str) -> Result<(), ScreenError> {
        self.count(path)?;
        // Without an escape the text is the URL itself. A value other than a text is no URL either.
        let url: Cow<'_, str> = match raw.contains('\\') {
            true => serde_json::from_str::<String>(raw).unwrap_or_default().into(),
            false => raw.trim_matches('"').into(),
        };
        self.screen.media.check(&url).map_err(|why| path.objection(why))
    }

    fn count(&mut self, path: &Path<'_>) -> Result<(), ScreenError> {
        let most = self.screen.media.count_max;
        self.media += 1;
        match self.media > most {
            true => Err(path.objection(format_args!(
                "is more than a request may bring: {most} images, sounds and videos"
            ))),
            false => Ok(()),
        }
    }

    fn look(&mut self, path: &Path<'_>) -> Result<(), ScreenError> {
        self.looked_at += 1;
        match self.looked_at > CHECKED_ITEMS_MAX {
            true => Err(path.objection(format_args!(
                "has too many parts, here and before: {CHECKED_ITEMS_MAX} are the most"
            ))),
            false => Ok(()),
        }
    }
}

/// Position of a value in its parent.
#[derive(Clone, Copy)]
enum PathStep<'a> {
    Member(&'a str),
    Element(usize),
}

/// Path of a value in the body.
#[derive(Clone, Copy)]
struct Path<'a> {
    above: Option<&'a Path<'a>>,
    place: PathStep<'a>,
}

impl<'a> Path<'a> {
    fn root(name: &'a str) -> Self {
        Self { above: None, place: PathStep::Member(name) }
    }

    fn under<'b>(&'b self, place: PathStep<'b>) -> Path<'b> {
        Path { above: Some(self), place }
    }

    fn objection(&self, what: impl fmt::Display) -> ScreenError {
        ScreenError { param: self.to_string(), message: format!("`{self}` {what}.") }
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(above) = self.above {
            write!(out, "{above}")?;
        }
        match (self.place, self.above) {
            (PathStep::Element(index), _) => write!(out, "[{index}]"),
            (PathStep::Member(name), None) => out.write_str(name),
            // A client's own name may be as long as the body.
            (PathStep::Member(name), Some(_)) => write!(out, ".{name:.most$}", most = SHOWN_MAX),
        }
    }
}

/// Visits the members of an object or the elements of an array, each as its JSON text, until the first
/// objection.
fn each<'a>(
    raw: &'a str,
    mut visit: impl FnMut(PathStep<'_>, &'a str) -> Result<(), ScreenError>,
) -> Result<(), ScreenError> {
    Entries::of(raw).enumerate().try_for_each(|(index, Entry { name, value })| match &name {
        Some(name) => visit(PathStep::Member(name), value),
        None => visit(PathStep::Element(index), value),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn checked(screen: &Screen, body: &Value) -> Result<(), ScreenError> {
        let fields: Vec<(String, String)> = body
            .as_object()
            .expect("an object")
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| (name.clone(), value.to_string()))
            .collect();
        screen.check(&CONVERSATIONS, |wanted| {
            fields.iter().find(|(name, _)| name == wanted).map(|(_, raw)| raw.as_str())
        })
    }

    fn param(screen: &Screen, body: &Value) -> String {
        checked(screen, body).expect_err("refused").param
    }

    #[test]
    fn what_endangers_an_engine_is_named_by_its_path() {
        let screen = Screen { template_variables: vec!["enable_thinking".to_owned()], ..Screen::default() };
        let part = |part: Value| {
            json!({"messages": [
            {"role": "system", "content": "http://127.0.0.1/ is a text"},
            {"role": "user", "content": [{"type": "text", "text": "x", "image_url": null}, part]}]})
        };
        let private = "http://169.254.169.254/latest";
        let cases = [
            (json!({"chat_template": "{{ x }}"}), "chat_template"),
            (json!({"documents": [{}]}), "documents"),
            (json!({"mm_processor_kwargs": {"num_crops": 9999}}), "mm_processor_kwargs"),
            (json!({"prompt_embeds": "AA=="}), "prompt_embeds"),
            (json!({"session_params": {"id": "x"}}), "session_params"),
            (json!({"chat_template_kwargs": {"tokenize": false}}), "chat_template_kwargs.tokenize"),
            (
                json!({"chat_template_kwargs": {"enable_thinking": ["x"]}}),
                "chat_template_kwargs.enable_thinking",
            ),
            (
                part(json!({"type": "image_embeds", "image_embeds": "AA"})),
                "messages[1].content[1].image_embeds",
            ),
            (
                part(json!({"type": "audio_embeds", "audio_embeds": {"a": "AA"}})),
                "messages[1].content[1].audio_embeds",
            ),
            (
                part(json!({"image_url": {"detail": "low", "url": private}})),
                "messages[1].content[1].image_url.url",
            ),
            (part(json!({"type": "text", "image_url": private})), "messages[1].content[1].image_url"),
            (
                part(json!({"type": "video", "video": ["https://example.com", private]})),
                "messages[1].content[1].video[1]",
            ),
            (
                json!({"messages": [{"role": "user", "content": {"audio_url": {"url": private}}}]}),
                "messages[0].content.audio_url.url",
            ),
            // Anthropic's and OpenAI's other surfaces, and embeddings.
            (
                json!({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [
                    {"type": "image", "source": {"type": "url", "url": private}}]}]}]}),
                "messages[0].content[0].content[0].source.url",
            ),
            (
                json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": private}]}]}),
                "input[0].content[0].image_url",
            ),
            (
                json!({"input": [{"type": "function_call_output", "output": [{"image_url": private}]}]}),
                "input[0].output[0].image_url",
            ),
            (json!({"input": [{"text": "a", "image": "/etc/passwd"}]}), "input[0].image"),
        ];
        for (body, expected) in &cases {
            assert_eq!(param(&screen, body), *expected, "{body}");
        }
        for good in [
            json!({"messages": [{"role": "user", "content": "http://127.0.0.1/"}], "chat_template": null}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
            part(json!({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})),
            part(json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}})),
            part(json!({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}})),
            part(json!({"type": "text", "text": "x", "source": "page 3", "image_embeds": null})),
            json!({"messages": [{"role": "assistant", "content": null, "audio": {"id": "a"}, "tool_calls": [
                {"function": {"name": "f", "arguments": "{\"image_url\": \"http://127.0.0.1\"}"}}]}]}),
            json!({"input": ["a", "b"]}),
            json!({"input": (0..100_000).collect::<Vec<u32>>()}),
            json!({"messages": 5, "input": "http://127.0.0.1"}),
        ] {
            assert_eq!(checked(&screen, &good), Ok(()), "{good:.200}", good = good.to_string());
        }
    }

    #[test]
    fn escapes_and_repeated_names_hide_nothing() {
        let screen = Screen::default();
        for messages in [
            r#"[{"cont\u0065nt":[{"im\u0061ge_url":{"u\u0072l":"http:\/\/127.0.0.1\/"}}]}]"#,
            r#"[{"content":[{"image_url":{"url":"http://10.0.0.1"},"image_url":{"url":"https://example.com"}}]}]"#,
            r#"[{"content":[{"image_url":{"url":"https://example.com","url":"http://10.0.0.1"}}],"content":"x"}]"#,
            r#"[ {"content" : [ {"image_url" : {"url" : "\u0068ttp://localhost/"} } ] } ]"#,
            r#"[{"content":[{"image_url":"http://exa\ud800mple.com"}]}]"#,
            r#"[{"\ud800":1,"content":[{"image_url":{"url":"http://10.0.0.1"}}]}]"#,
            r#"[{"content":[{"\udc00":1,"image_url":{"\ud800":1,"url":"http://10.0.0.1"}}]}]"#,
        ] {
            let checked = screen.check(&CONVERSATIONS, |name| (name == "messages").then_some(messages));
            assert!(checked.is_err(), "{messages}");
        }
    }

    #[test]
    fn what_is_ranked_is_looked_at_too() {
        let screen = Screen::default();
        let private = "http://169.254.169.254/latest";
        let image = json!({"type": "image_url", "image_url": {"url": private}});
        for body in [
            json!({"query": "q", "documents": {"content": [image.clone()]}}),
            json!({"query": {"content": [image.clone()]}, "documents": ["a"]}),
            json!({"query": "q", "documents": ["a", [image.clone()]]}),
            json!({"query": "q", "documents": [{"content": [{"type": "image_embeds", "image_embeds": "AA"}]}]}),
            json!({"query": [[image.clone()]], "items": ["a"]}),
            json!({"text_1": "a", "text_2": [{"image": private}]}),
            json!({"data_1": image, "data_2": "b"}),
        ] {
            let raw: Vec<(String, String)> = body
                .as_object()
                .into_iter()
                .flatten()
                .map(|(name, value)| (name.clone(), value.to_string()))
                .collect();
            let checked = screen.check(&RANKED, |wanted| {
                raw.iter().find(|(name, _)| name == wanted).map(|(_, raw)| raw.as_str())
            });
            assert!(checked.is_err(), "{body}");
        }
    }

    #[test]
    fn an_operator_may_let_everything_through() {
        let allowed = TEMPLATE_FIELDS.into_iter().chain(["image_embeds"]).map(str::to_owned).collect();
        let screen = Screen { allowed, ..Screen::default() };
        let body = json!({"chat_template": "x", "documents": [], "chat_template_kwargs": {"tokenize": {}},
            "messages": [{"content": [{"image_embeds": "AA"}]}]});
        assert_eq!(checked(&screen, &body), Ok(()));
    }

    #[test]
    fn what_is_looked_at_is_bounded() {
        let screen = Screen {
            media: MediaPolicy { count_max: 2, data_bytes_max: 100, ..MediaPolicy::default() },
            ..Screen::default()
        };
        let image = json!({"type": "image_url", "image_url": {"url": "data:,x"}});
        let of =
            |count: usize| json!({"messages": [{"role": "user", "content": vec![image.clone(); count]}]});
        assert_eq!(checked(&screen, &of(2)), Ok(()));
        assert_eq!(param(&screen, &of(3)), "messages[0].content[2].image_url.url");
        let large = format!("data:,{}", "x".repeat(100));
        let body = json!({"messages": [{"content": [{"image_url": {"url": large}}]}]});
        assert_eq!(param(&screen, &body), "messages[0].content[0].image_url.url");
        let body = json!({"messages": [{"content": [{"input_audio": {"data": "x".repeat(200)}}]}]});
        assert_eq!(param(&screen, &body), "messages[0].content[0].input_audio.data");
        let many = format!("[{}{{}}]", "{},".repeat(CHECKED_ITEMS_MAX));
        let refused = screen.check(&CONVERSATIONS, |name| (name == "messages").then_some(many.as_str()));
        assert_eq!(refused.expect_err("refused").param, "messages");
        // Walked without recursion at any depth.
        let deep = format!("[{}{}]", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(
            screen.check(&CONVERSATIONS, |name| (name == "messages").then_some(deep.as_str())),
            Ok(())
        );
        let name = "x".repeat(10_000);
        assert!(param(&screen, &json!({"chat_template_kwargs": {name: 1}})).len() < 100);
    }
}
