//! The output of a parser, and the sink through which every family writes it.
//!
//! The sink numbers the calls, gives each an id, and joins adjacent pieces of one kind within a push, so that a family may write
//! byte ranges as it finds them without making a message of each.

use crate::ids::CallIds;
use crate::tool::Tool;

/// One piece of a model's output. Adjacent pieces of one kind belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Reasoning of the model, without its tags.
    Reasoning(String),
    /// Text for the user, and every malformed call, exactly as the model wrote it.
    Content(String),
    /// A call begins. Its name is always complete.
    ToolCallStart {
        /// Index of the call in this output, from 0.
        index: u32,
        /// The model's own id if the format has one, otherwise a generated one.
        id: String,
        /// Name of the function, without a namespace.
        name: String,
    },
    /// The next piece of a call's arguments; all pieces of a call make one JSON text.
    ToolCallArguments {
        /// Index of the call, as in its start.
        index: u32,
        /// Text to append to the arguments.
        fragment: String,
    },
    /// A call ended; each started call ends exactly once.
    ToolCallEnd {
        /// Index of the call, as in its start.
        index: u32,
        /// Whether the arguments are one complete, valid JSON text. `false` when the output ended inside the call, or when the model
        /// wrote text that is not JSON.
        complete: bool,
    },
}

/// Number of started calls, and the generator of their ids.
#[derive(Debug)]
pub(crate) struct Calls {
    pub(crate) ids: CallIds,
    pub(crate) started: u32,
}

/// Destination of a family's output.
pub(crate) struct Sink<'a> {
    pub(crate) out: &'a mut Vec<Output>,
    pub(crate) calls: &'a mut Calls,
    pub(crate) tools: &'a [Tool],
}

impl Sink<'_> {
    pub(crate) fn reasoning(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.out.last_mut() {
            Some(Output::Reasoning(last)) => last.push_str(text),
            _ => self.out.push(Output::Reasoning(text.to_owned())),
        }
    }

    pub(crate) fn content(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.out.last_mut() {
            Some(Output::Content(last)) => last.push_str(text),
            _ => self.out.push(Output::Content(text.to_owned())),
        }
    }

    /// Begins a call with the model's own id or, without one, a generated id.
    pub(crate) fn start(&mut self, name: &str, id: Option<String>) {
        let index = self.calls.started;
        self.calls.started += 1;
        let id = id.unwrap_or_else(|| self.calls.ids.next_id());
        self.out.push(Output::ToolCallStart { index, id, name: name.to_owned() });
    }

    /// Appends to the arguments of the call that was started last.
    pub(crate) fn arguments(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.out.last_mut() {
            Some(Output::ToolCallArguments { fragment, .. }) => fragment.push_str(text),
            _ => {
                let index = self.calls.started.saturating_sub(1);
                self.out.push(Output::ToolCallArguments { index, fragment: text.to_owned() });
            }
        }
    }

    /// Ends the call that was started last.
    pub(crate) fn end(&mut self, complete: bool) {
        let index = self.calls.started.saturating_sub(1);
        self.out.push(Output::ToolCallEnd { index, complete });
    }

    /// Returns the tool of that name, if the request offered it.
    pub(crate) fn tool(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.name == name)
    }

    /// Whether text without any marker may be a call of that name: the tool must be offered, unless the caller gave no tools at
    /// all.
    pub(crate) fn plausible(&self, name: &str) -> bool {
        self.tools.is_empty() || self.tool(name).is_some()
    }
}
