//! The driver: text in, [`Output`] out, in two stages.
//!
//! The reasoning stage routes text; what it calls content goes on to the tool stage. Each stage keeps the
//! end of its text that may become a marker and sees it again with the next piece. Both stages decide only
//! what no further text could change, so the result is the same for every division of the output into
//! pieces, apart from where pieces of one kind are cut.
//!
//! One parser serves one choice of one request; it has no locks and does no I/O. Work is linear in the
//! text, and memory is bounded by [`crate::limits`].

use crate::format::{ReasoningFormat, ToolFormat};
use crate::ids::CallIds;
use crate::machine::Machine;
use crate::output::{Calls, Output, Sink};
use crate::reasoning::{Reasoning, Route};
use crate::tool::Tool;

/// A streaming parser of one output.
#[derive(Debug)]
pub struct Parser {
    reasoning: Option<Reasoning>,
    tool: Option<Box<dyn Machine>>,
    tools: Vec<Tool>,
    calls: Calls,
    /// Text that the reasoning stage has not decided.
    undecided: String,
    /// Content that the tool stage has not decided.
    undecided_content: String,
}

impl Parser {
    /// A parser for one output. Without a tool format all content is passed on; without a reasoning format
    /// nothing is reasoning. Harmony separates both by itself, so either of the two being Harmony selects
    /// it alone, unless calls are forced. `tools` may be empty if they are not known.
    #[must_use]
    pub fn new(
        tool: Option<ToolFormat>,
        reasoning: Option<ReasoningFormat>,
        tools: &[Tool],
        ids: CallIds,
    ) -> Self {
        let ids = if tool == Some(ToolFormat::Mistral) { ids.for_mistral() } else { ids };
        let harmony = tool == Some(ToolFormat::Harmony) || reasoning == Some(ReasoningFormat::Harmony);
        let forced = tool.as_ref().is_some_and(ToolFormat::forced);
        let (tool, reasoning) = match (harmony, forced) {
            (true, false) => (Some(ToolFormat::Harmony), None),
            _ => (tool, reasoning),
        };
        Self {
            reasoning: reasoning.and_then(ReasoningFormat::stage),
            tool: tool.map(ToolFormat::machine),
            tools: tools.to_vec(),
            calls: Calls { ids, started: 0 },
            undecided: String::new(),
            undecided_content: String::new(),
        }
    }

    /// Takes the next piece of the output and appends what it decides to `out`.
    pub fn push(&mut self, text: &str, out: &mut Vec<Output>) {
        self.route(text, false, out);
    }

    /// Ends the output: what was held comes out, and a call that is not complete ends as such. Call it
    /// once; a parser that is finished is of no further use.
    pub fn finish(&mut self, out: &mut Vec<Output>) {
        self.route("", true, out);
        if let Some(reasoning) = &mut self.reasoning {
            let (text, route) = reasoning.finish();
            self.pass(&text, route, out);
        }
        self.content("", true, out);
        if let Some(mut tool) = self.tool.take() {
            tool.finish(&mut self.sink(out));
        }
    }

    /// Calls that were started so far: not zero means `finish_reason` is `tool_calls`.
    #[must_use]
    pub fn calls_started(&self) -> u32 {
        self.calls.started
    }

    fn sink<'a>(&'a mut self, out: &'a mut Vec<Output>) -> Sink<'a> {
        Sink { out, calls: &mut self.calls, tools: &self.tools }
    }

    /// The reasoning stage.
    fn route(&mut self, text: &str, last: bool, out: &mut Vec<Output>) {
        let Some(mut reasoning) = self.reasoning.take() else {
            return self.content(text, false, out);
        };
        let mut held = std::mem::take(&mut self.undecided);
        let joined = !held.is_empty();
        if joined {
            held.push_str(text);
        }
        let text = if joined { held.as_str() } else { text };
        let mut at = 0;
        while at < text.len() {
            let routed = reasoning.step(&text[at..], last);
            self.pass(&routed.text, routed.route, out);
            at += routed.used;
            if !routed.again {
                break;
            }
        }
        self.undecided = text[at..].to_owned();
        self.reasoning = Some(reasoning);
    }

    fn pass(&mut self, text: &str, route: Route, out: &mut Vec<Output>) {
        match route {
            Route::Reasoning => self.sink(out).reasoning(text),
            Route::Content => self.content(text, false, out),
        }
    }

    /// The tool stage.
    fn content(&mut self, text: &str, last: bool, out: &mut Vec<Output>) {
        let Some(mut tool) = self.tool.take() else {
            return self.sink(out).content(text);
        };
        let mut held = std::mem::take(&mut self.undecided_content);
        let joined = !held.is_empty();
        if joined {
            held.push_str(text);
        }
        let text = if joined { held.as_str() } else { text };
        let mut at = 0;
        while at < text.len() {
            let step = tool.step(&text[at..], last, &mut self.sink(out));
            at += step.used;
            if !step.again {
                break;
            }
        }
        self.undecided_content = text[at..].to_owned();
        self.tool = Some(tool);
    }
}
