//! Answers of `/v1/completions` and `/v1/chat/completions`, as vLLM 0.32 and SGLang write them.
//!
//! Hot path: one buffer per answer, no tree.

use serde_json::{Value, json};

use super::answer::{Answer, Choice, Usage};
use super::json::{ids, number, text};
use super::parsed_request::Surface;
use crate::Dialect;
use crate::output_generator::Ending;

const FINGERPRINT: &str = "\"system_fingerprint\":\"vllm-0.32.0-mock0000\"";

/// Returns the common start of each piece of a stream.
pub(super) fn head(answer: &Answer) -> String {
    let object = match answer.ask.surface {
        Surface::Completion => "text_completion",
        _ => "chat.completion.chunk",
    };
    let mut out = String::with_capacity(160);
    out.push_str("data: ");
    begin(answer, object, &mut out);
    out
}

fn begin(answer: &Answer, object: &str, out: &mut String) {
    out.push_str("{\"id\":");
    text(out, &answer.id);
    out.push_str(",\"object\":\"");
    out.push_str(object);
    out.push_str("\",\"created\":");
    number(out, answer.created);
    out.push_str(",\"model\":");
    text(out, answer.model());
    out.push_str(",\"choices\":[");
}

fn is_chat(answer: &Answer) -> bool {
    answer.ask.surface == Surface::Chat
}

fn prompt_ids<'a>(answer: &'a Answer, choice: &Choice) -> Option<&'a [u32]> {
    answer.ask.return_token_ids.then(|| answer.ask.prompts[choice.prompt].as_slice())
}

fn index_to(out: &mut String, index: usize) {
    out.push_str("{\"index\":");
    number(out, index);
}

/// Writes the end of a choice: the finish reason and the stop.
fn finish(answer: &Answer, choice: &Choice, is_last: bool, out: &mut String) {
    let is_vllm = answer.worker.config.dialect == Dialect::Vllm;
    if !is_last {
        out.push_str(",\"finish_reason\":null");
        if !is_chat(answer) && is_vllm {
            out.push_str(",\"stop_reason\":null");
        }
        return;
    }
    out.push_str(",\"finish_reason\":\"");
    out.push_str(answer.finish_reason(choice));
    out.push_str(if is_vllm { "\",\"stop_reason\":" } else { "\",\"matched_stop\":" });
    match &choice.output.ending {
        Ending::StopString(stop) => text(out, stop),
        Ending::StopToken(id) => number(out, id),
        // SGLang names the model's own end token too.
        Ending::Eos if !is_vllm => number(out, choice.output.tokens.last().copied().unwrap_or(0)),
        Ending::Eos | Ending::Length => out.push_str("null"),
    }
}

/// The first pieces of a chat: one for each choice, with its role.
pub(super) fn opening(answer: &mut Answer, out: &mut String) {
    if !is_chat(answer) {
        return;
    }
    for (index, choice) in answer.choices.iter().enumerate() {
        out.push_str(&answer.head);
        index_to(out, index);
        out.push_str(
            ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]",
        );
        if answer.ask.continuous_usage {
            let prompt = answer.ask.prompts.iter().map(Vec::len).sum();
            running_usage(Usage { prompt, ..Usage::default() }, true, out);
        }
        if answer.worker.config.dialect == Dialect::Vllm {
            out.push_str(",\"prompt_token_ids\":");
            ids(out, prompt_ids(answer, choice));
            out.push_str(",\"prompt_text\":null");
        }
        out.push_str("}\n\n");
    }
}

/// A piece of a stream: the tokens of a choice up to `to`.
pub(super) fn piece(answer: &mut Answer, index: usize, to: usize, out: &mut String) {
    let choice = &answer.choices[index];
    let (from, output) = (choice.sent, &choice.output);
    let is_last = to == output.tokens.len();
    let words = &output.text[output.shown(from)..output.shown(to)];
    out.push_str(&answer.head);
    index_to(out, index);
    match answer.ask.forced.as_ref().and_then(|forced| forced.tool.as_deref()) {
        Some(tool) if is_chat(answer) => {
            out.push_str(",\"delta\":{\"tool_calls\":[{\"index\":0,");
            if from == 0 {
                tool_head(answer, tool, out);
            } else {
                out.push_str("\"function\":{");
            }
            out.push_str("\"arguments\":");
            text(out, words);
            out.push_str("}}]}");
        }
        _ if is_chat(answer) => {
            out.push_str(",\"delta\":{\"content\":");
            text(out, words);
            out.push('}');
        }
        _ => {
            out.push_str(",\"text\":");
            let echo = echo(answer, choice).filter(|_| from == 0);
            match echo {
                Some(echo) => text(out, &(echo + words)),
                None => text(out, words),
            }
        }
    }
    out.push_str(",\"logprobs\":");
    logprobs(answer, choice, from, to, out);
    finish(answer, choice, is_last, out);
    let token_ids = answer.ask.return_token_ids.then(|| &output.tokens[from..to]);
    if !is_chat(answer) {
        out.push_str(",\"prompt_token_ids\":");
        ids(out, prompt_ids(answer, choice).filter(|_| from == 0));
    }
    out.push_str(",\"token_ids\":");
    ids(out, token_ids);
    out.push_str("}]");
    if answer.ask.continuous_usage {
        let usage = Usage { completion: answer.usage().completion + to - from, ..answer.usage() };
        running_usage(usage, is_chat(answer), out);
    }
    if is_last && is_chat(answer) && !answer.ask.include_usage {
        out.push(',');
        out.push_str(FINGERPRINT);
    }
    out.push_str("}\n\n");
}

/// The last pieces: usage, if it was asked for, and the end.
pub(super) fn closing(answer: &mut Answer, out: &mut String) {
    if answer.ask.include_usage {
        out.push_str(&answer.head);
        out.push(']');
        usage(answer, false, out);
        out.push(',');
        out.push_str(FINGERPRINT);
        out.push_str("}\n\n");
    }
    out.push_str("data: [DONE]\n\n");
}

/// A whole answer.
pub(super) fn whole(answer: &Answer) -> String {
    let is_chat = is_chat(answer);
    let mut out = String::with_capacity(768 + answer.choices.len() * 256);
    begin(answer, if is_chat { "chat.completion" } else { "text_completion" }, &mut out);
    for (index, choice) in answer.choices.iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        whole_choice(answer, index, choice, &mut out);
    }
    out.push_str("],\"service_tier\":null,");
    out.push_str(FINGERPRINT);
    usage(answer, true, &mut out);
    if is_chat {
        out.push_str(",\"prompt_logprobs\":null,\"prompt_token_ids\":");
        ids(&mut out, answer.choices.first().and_then(|choice| prompt_ids(answer, choice)));
        out.push_str(",\"prompt_text\":null");
    }
    out.push_str(",\"kv_transfer_params\":");
    match &answer.transfer {
        Some(transfer) => out.push_str(&transfer.to_string()),
        None => out.push_str("null"),
    }
    out.push_str(",\"ec_transfer_params\":null,\"metrics\":null}");
    out
}

fn whole_choice(answer: &Answer, index: usize, choice: &Choice, out: &mut String) {
    let output = &choice.output;
    index_to(out, index);
    let tool = answer.ask.forced.as_ref().and_then(|forced| forced.tool.as_deref());
    match tool.filter(|_| is_chat(answer)) {
        Some(tool) => {
            out.push_str(",\"message\":{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{");
            tool_head(answer, tool, out);
            out.push_str("\"arguments\":");
            text(out, &output.text);
            out.push_str("}}]}");
        }
        None if is_chat(answer) => {
            out.push_str(",\"message\":{\"role\":\"assistant\",\"content\":");
            text(out, &output.text);
            out.push_str(match answer.worker.config.dialect {
                Dialect::Vllm => {
                    ",\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,\"reasoning\":null}"
                }
                Dialect::Sglang => ",\"reasoning_content\":null,\"tool_calls\":null}",
            });
        }
        None => {
            out.push_str(",\"text\":");
            text(out, &(echo(answer, choice).unwrap_or_default() + &output.text));
        }
    }
    out.push_str(",\"logprobs\":");
    logprobs(answer, choice, 0, output.tokens.len(), out);
    finish(answer, choice, true, out);
    out.push_str(",\"token_ids\":");
    ids(out, answer.ask.return_token_ids.then_some(output.tokens.as_slice()));
    if !is_chat(answer) {
        out.push_str(",\"prompt_logprobs\":null,\"prompt_token_ids\":");
        ids(out, prompt_ids(answer, choice));
    }
    out.push_str(",\"routed_experts\":null}");
}

fn echo(answer: &Answer, choice: &Choice) -> Option<String> {
    let prompt = &answer.ask.prompts[choice.prompt];
    answer.ask.echo.then(|| answer.worker.model.text.tokenizer.decode(prompt, true))
}

fn tool_head(answer: &Answer, tool: &str, out: &mut String) {
    out.push_str("\"id\":");
    text(out, &format!("chatcmpl-tool-{}", answer.id));
    out.push_str(",\"type\":\"function\",\"function\":{\"name\":");
    text(out, tool);
    out.push(',');
}

/// Writes the usage of a piece, without cached tokens.
fn running_usage(usage: Usage, is_chat: bool, out: &mut String) {
    out.push_str(",\"usage\":");
    counts(usage, out);
    if is_chat {
        out.push_str(",\"completion_tokens_details\":null");
    }
    out.push('}');
}

fn counts(usage: Usage, out: &mut String) {
    out.push_str("{\"prompt_tokens\":");
    number(out, usage.prompt);
    out.push_str(",\"total_tokens\":");
    number(out, usage.prompt + usage.completion);
    out.push_str(",\"completion_tokens\":");
    number(out, usage.completion);
}

/// The usage of the answer.
fn usage(answer: &Answer, is_whole: bool, out: &mut String) {
    let usage = answer.usage();
    let is_chat = is_chat(answer);
    out.push_str(",\"usage\":");
    counts(usage, out);
    out.push_str(",\"prompt_tokens_details\":{\"cached_tokens\":");
    number(out, usage.cached);
    if is_chat {
        let whole_blocks =
            usage.prompt / answer.worker.config.block_tokens * answer.worker.config.block_tokens;
        out.push_str(",\"created_cache_tokens\":");
        number(out, whole_blocks.saturating_sub(usage.cached));
    } else if is_whole {
        out.push_str(",\"created_cache_tokens\":null");
    }
    out.push_str(if is_whole {
        ",\"multimodal_tokens\":null},\"completion_tokens_details\":null}"
    } else {
        "}}"
    });
}

/// Log-probabilities of the tokens of a choice, in the surface's shape, or null.
fn logprobs(answer: &Answer, choice: &Choice, from: usize, to: usize, out: &mut String) {
    let Some(top) = answer.ask.logprobs else {
        out.push_str("null");
        return;
    };
    let tokenizer = &answer.worker.model.text.tokenizer;
    let name = |id: u32| match answer.ask.tokens_as_ids {
        true => format!("token_id:{id}"),
        false => tokenizer.decode(&[id], false),
    };
    let drawn = |at: usize| answer.worker.model.generator.logprobs(choice.output.tokens[at], at, top.max(1));
    let value = if is_chat(answer) {
        let entry = |id: u32, logprob: f32| json!({ "token": name(id), "logprob": logprob, "bytes": tokenizer.bytes_of(id) });
        let content = (from..to).map(|at| {
            let drawn = drawn(at);
            let mut chosen = entry(drawn[0].0, drawn[0].1);
            chosen["top_logprobs"] =
                drawn.iter().take(top).map(|&(id, logprob)| entry(id, logprob)).collect();
            chosen
        });
        json!({ "content": content.collect::<Vec<Value>>() })
    } else {
        let mut offset: usize = (0..from).map(|at| name(choice.output.tokens[at]).chars().count()).sum();
        let (mut offsets, mut chosen, mut names, mut tops) = (vec![], vec![], vec![], vec![]);
        for at in from..to {
            let drawn = drawn(at);
            let own = name(drawn[0].0);
            offsets.push(offset);
            offset += own.chars().count();
            chosen.push(drawn[0].1);
            names.push(own);
            let alternatives = drawn.iter().map(|&(id, logprob)| (name(id), Value::from(logprob)));
            tops.push(Value::Object(alternatives.collect()));
        }
        json!({ "text_offset": offsets, "token_logprobs": chosen, "tokens": names, "top_logprobs": tops })
    };
    out.push_str(&value.to_string());
}
