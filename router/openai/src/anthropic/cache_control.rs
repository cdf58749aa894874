//! `cache_control` of a Messages request: how long the prompt up to a block is to stay in the cache.
//!
//! Blocks of KV are kept up to the end of the prompt, whichever part is marked: the longest time of any mark counts.

use std::iter;
use std::time::Duration;

use serde_json::Value;

use crate::retention;

/// The time of a mark that names none.
const DEFAULT: &str = "5m";

/// The longest time that the request names, as it names it; `None` without a mark.
pub(super) fn longest(request: &Value) -> Option<&str> {
    let contents = blocks(&request["messages"]).iter().flat_map(|message| blocks(&message["content"]));
    // Results of tools have blocks of their own.
    let contents = contents.flat_map(|block| iter::once(block).chain(blocks(&block["content"])));
    let marked = iter::once(request)
        .chain(blocks(&request["system"]))
        .chain(blocks(&request["tools"]))
        .chain(contents);
    marked.filter_map(ttl_of).max_by_key(|(time, _)| *time).map(|(_, text)| text)
}

fn blocks(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The time of the block's own mark. One that cannot be understood is none: it changes no answer.
fn ttl_of(block: &Value) -> Option<(Duration, &str)> {
    let control = block.get("cache_control")?.as_object()?;
    let text = match control.get("ttl") {
        None | Some(Value::Null) => DEFAULT,
        Some(ttl) => ttl.as_str()?,
    };
    Some((retention::parse(text)?, text))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_longest_time_of_any_mark_counts() {
        let mark = json!({ "type": "ephemeral" });
        let hour = json!({ "type": "ephemeral", "ttl": "1h" });
        let content = |mark: &Value| json!([{ "type": "text", "text": "a", "cache_control": mark }]);
        let nested = json!([{ "type": "tool_result", "tool_use_id": "1", "content": content(&hour) }]);
        for (request, expected) in [
            (json!({ "messages": [{ "role": "user", "content": "a" }] }), None),
            (json!({ "cache_control": mark, "messages": [] }), Some("5m")),
            (json!({ "system": content(&hour), "messages": [{ "content": content(&mark) }] }), Some("1h")),
            (json!({ "system": content(&mark), "messages": [{ "content": content(&hour) }] }), Some("1h")),
            (json!({ "tools": [{ "name": "f", "cache_control": mark }], "messages": [] }), Some("5m")),
            (json!({ "messages": [{ "content": nested }] }), Some("1h")),
            (json!({ "cache_control": { "type": "ephemeral", "ttl": "soon" } }), None),
            (json!({ "cache_control": null, "system": "a" }), None),
        ] {
            assert_eq!(longest(&request), expected, "{request}");
        }
    }
}
