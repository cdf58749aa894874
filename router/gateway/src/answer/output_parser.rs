//! The output of a chat, split into reasoning, content and tool calls, as deltas of a stream or as a
//! message.

use router_openai::Finish;
use router_parsers::{CallIds, Output, Parser, ReasoningFormat, Tool, ToolFormat};
use serde_json::{Map, Value, json};

/// Formats in which a model writes tool calls and reasoning, if it does.
#[derive(Debug, Clone, Default)]
pub struct Formats {
    /// Tool calls.
    pub tools: Option<ToolFormat>,
    /// Reasoning.
    pub reasoning: Option<ReasoningFormat>,
}

impl Formats {
    /// Returns the formats by their names in the configuration: `auto` detects them from the chat template,
    /// `none` is none.
    #[must_use]
    pub fn new(tools: &str, reasoning: &str, template: Option<&str>) -> Self {
        Self {
            tools: match tools {
                "auto" => template.and_then(ToolFormat::detect),
                name => ToolFormat::from_name(name),
            },
            reasoning: match reasoning {
                "auto" => template.and_then(ReasoningFormat::detect),
                name => ReasoningFormat::from_name(name),
            },
        }
    }

    /// Returns a parser for one output; `None` when the output is plain text. `prompt_end` is the end of
    /// the prompt's text: some templates open the reasoning themselves.
    pub(crate) fn parser(&self, tools: Option<&Value>, prompt_end: &str, seed: u64) -> Option<Parser> {
        let tools = tools_of(tools);
        let format = self.tools.clone().filter(|_| !tools.is_empty());
        let reasoning = self.reasoning.and_then(|format| format.after_prompt(prompt_end));
        if format.is_none() && reasoning.is_none() {
            return None;
        }
        Some(Parser::new(format, reasoning, &tools, CallIds::seeded(seed)))
    }
}

/// A parser for the output of a forced tool call, which the grammar makes bare JSON.
pub(crate) fn forced_parser(format: ToolFormat, tools: Option<&Value>, seed: u64) -> Parser {
    Parser::new(Some(format), None, &tools_of(tools), CallIds::seeded(seed))
}

fn tools_of(tools: Option<&Value>) -> Vec<Tool> {
    tools.and_then(Value::as_array).into_iter().flatten().filter_map(Tool::from_request).collect()
}

/// The output of one choice, in a parser.
#[derive(Debug)]
pub(crate) struct OutputParser {
    parser: Parser,
    pieces: Vec<Output>,
    is_over: bool,
}

impl OutputParser {
    pub(crate) fn new(parser: Parser) -> Self {
        Self { parser, pieces: Vec::new(), is_over: false }
    }

    /// Takes text; `is_last` marks the last text.
    pub(crate) fn push(&mut self, text: &str, is_last: bool) {
        if self.is_over {
            return;
        }
        self.parser.push(text, &mut self.pieces);
        if is_last {
            self.is_over = true;
            self.parser.finish(&mut self.pieces);
        }
    }

    /// Returns the finish reason for the client: tool calls replace a stop.
    pub(crate) fn finish(&self, finish: Finish) -> Finish {
        if finish == Finish::Stop && self.parser.calls_started() > 0 { Finish::ToolCalls } else { finish }
    }

    /// Returns the output since the last call, as deltas.
    pub(crate) fn deltas(&mut self) -> Vec<Value> {
        let delta = |piece| match piece {
            Output::Reasoning(text) => Some(json!({ "reasoning_content": text })),
            Output::Content(text) => Some(json!({ "content": text })),
            Output::ToolCallStart { index, id, name } => Some(json!({ "tool_calls": [{
                "index": index, "id": id, "type": "function", "function": { "name": name, "arguments": "" },
            }] })),
            Output::ToolCallArguments { index, fragment } => {
                Some(json!({ "tool_calls": [{ "index": index, "function": { "arguments": fragment } }] }))
            }
            Output::ToolCallEnd { .. } => None,
        };
        self.pieces.drain(..).filter_map(delta).collect()
    }

    /// Returns the whole output as one message.
    pub(crate) fn message(&mut self) -> Value {
        let (mut content, mut reasoning) = (String::new(), String::new());
        let mut calls: Vec<(String, String, String)> = Vec::new();
        for piece in self.pieces.drain(..) {
            match piece {
                Output::Reasoning(text) => reasoning.push_str(&text),
                Output::Content(text) => content.push_str(&text),
                Output::ToolCallStart { id, name, .. } => calls.push((id, name, String::new())),
                Output::ToolCallArguments { index, fragment } => {
                    if let Some(call) = calls.get_mut(index as usize) {
                        call.2.push_str(&fragment);
                    }
                }
                Output::ToolCallEnd { .. } => {}
            }
        }
        let mut message = Map::new();
        message.insert("role".to_owned(), "assistant".into());
        let content = if content.is_empty() && !calls.is_empty() { Value::Null } else { content.into() };
        message.insert("content".to_owned(), content);
        message.insert("refusal".to_owned(), Value::Null);
        if !reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), reasoning.into());
        }
        if !calls.is_empty() {
            let call = |(id, name, arguments): &(String, String, String)| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
            message.insert("tool_calls".to_owned(), calls.iter().map(call).collect());
        }
        Value::Object(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "<think>hm</think>\n\nIt is <tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";

    fn parser() -> OutputParser {
        let template = "<tool_call></tool_call> <think> </think>";
        let formats = Formats::new("hermes", "qwen3", Some(template));
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
        OutputParser::new(formats.parser(Some(&tools), "<|assistant|>", 7).expect("a parser"))
    }

    #[test]
    fn a_message_and_its_deltas_say_the_same() {
        let mut whole = parser();
        whole.push(TEXT, true);
        assert_eq!(whole.finish(Finish::Stop), Finish::ToolCalls);
        assert_eq!(whole.finish(Finish::Length), Finish::Length);
        let message = whole.message();
        assert_eq!(message["reasoning_content"], "hm");
        assert_eq!(message["tool_calls"][0]["function"]["name"], "f");
        let mut streamed = parser();
        let (mut content, mut arguments) = (String::new(), String::new());
        for (at, letter) in TEXT.char_indices() {
            streamed.push(letter.encode_utf8(&mut [0; 4]), at + letter.len_utf8() == TEXT.len());
            for delta in streamed.deltas() {
                content.push_str(delta["content"].as_str().unwrap_or_default());
                arguments
                    .push_str(delta["tool_calls"][0]["function"]["arguments"].as_str().unwrap_or_default());
            }
        }
        assert_eq!(message["content"], content.as_str());
        assert_eq!(message["tool_calls"][0]["function"]["arguments"], arguments.as_str());
        assert_eq!(serde_json::from_str::<Value>(&arguments).expect("JSON"), json!({"x": 1}));
    }

    #[test]
    fn forced_calls_are_read_without_marks() {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        for (format, text) in [
            (ToolFormat::ForcedArray, r#"[{"name": "f", "parameters": {"x": "<think>"}}]"#),
            (ToolFormat::ForcedNamed("f".to_owned()), r#"{"x": "<think>"}"#),
        ] {
            let mut parser = OutputParser::new(forced_parser(format, Some(&tools), 1));
            parser.push(text, true);
            assert_eq!(parser.finish(Finish::Stop), Finish::ToolCalls);
            let message = parser.message();
            assert_eq!(message["tool_calls"][0]["function"]["name"], "f", "{message}");
            let arguments = message["tool_calls"][0]["function"]["arguments"].as_str().expect("text");
            assert_eq!(serde_json::from_str::<Value>(arguments).expect("JSON"), json!({"x": "<think>"}));
        }
    }

    #[test]
    fn plain_models_need_no_parser() {
        assert!(Formats::new("auto", "auto", Some("{{ m.content }}")).parser(None, "", 1).is_none());
        let hermes = Formats::new("hermes", "none", None);
        assert!(hermes.parser(None, "", 1).is_none(), "no tools, no calls");
    }
}
