//! Properties over random outputs, made of markers, JSON crumbs and numbered words: no panic, the same
//! result for every division, and no word lost. Every failure names its seed.

use crate::harness::{parse, say};
use router_parsers::{Output, ReasoningFormat, ToolFormat};

/// Outputs tried per format.
const SEEDS: u64 = 1_000;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) % bound as u64) as usize
    }
}

const CRUMBS: &[&str] = &[
    " ",
    "\n",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "=",
    ",",
    ";",
    ":",
    "\"",
    "'",
    "\\",
    "<",
    "null",
    "1.5",
    "-",
    "é",
    "🏔",
    "{\"name\": \"get_time\", \"arguments\": {",
    "{\"name\": \"get_time\", \"parameters\": {}}",
    "}}",
    "{}",
    "\", \"arguments\": {\"",
    "get_time",
    "get_time(",
    "[get_time(zone=",
    "zone=",
];

fn markers(tool: &ToolFormat) -> &'static [&'static str] {
    match tool {
        ToolFormat::Hermes => {
            &["<tool_call>", "</tool_call>", "<tool_call>{\"name\": \"get_time\", \"arguments\": "]
        }
        ToolFormat::QwenCoder => &[
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "<function=get_time>",
            "</function>",
            "<parameter=",
            "<parameter=zone>",
            "<tool_call><function=get_weather>",
            "<parameter=days>",
            "<parameter=note>",
            "</parameter>",
            "\n</parameter>",
            ">",
        ],
        ToolFormat::Glm45 => &[
            "<tool_call>",
            "</tool_call>",
            "<tool_call>get_weather\n",
            "<arg_key>",
            "</arg_key>",
            "<arg_key>days</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ],
        ToolFormat::Llama3 => &["<|python_tag|>"],
        ToolFormat::Mistral => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_CALLS]get_time[ARGS]{"],
        ToolFormat::DeepSeekV3 | ToolFormat::DeepSeekV31 => &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "```json",
            "```",
            "function",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{",
            "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{",
        ],
        ToolFormat::KimiK2 => &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{",
        ],
        ToolFormat::Harmony => &[
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "assistant",
            "<|channel|>final<|message|>",
            "<|channel|>analysis<|message|>",
            "<|channel|>commentary to=functions.get_time<|message|>",
            "to=functions.get_time",
            "final",
        ],
        ToolFormat::Pythonic => {
            &["<|python_start|>", "<|python_end|>", "[get_time(zone=[", "[get_time(zone='"]
        }
        ToolFormat::ForcedArray | ToolFormat::ForcedNamed(_) => &["[{", "{\"zone\": "],
    }
}

fn formats() -> Vec<ToolFormat> {
    vec![
        ToolFormat::Hermes,
        ToolFormat::QwenCoder,
        ToolFormat::Llama3,
        ToolFormat::Mistral,
        ToolFormat::DeepSeekV3,
        ToolFormat::DeepSeekV31,
        ToolFormat::Harmony,
        ToolFormat::KimiK2,
        ToolFormat::Glm45,
        ToolFormat::Pythonic,
        ToolFormat::ForcedArray,
        ToolFormat::ForcedNamed("get_time".into()),
    ]
}

fn output(tool: &ToolFormat, random: &mut Random) -> (String, Vec<String>) {
    let markers = markers(tool);
    let (mut text, mut words) = (String::new(), Vec::new());
    for number in 0..1 + random.below(24) {
        match random.below(8) {
            0..=2 => text.push_str(markers[random.below(markers.len())]),
            3..=5 => text.push_str(CRUMBS[random.below(CRUMBS.len())]),
            6 => text.push_str(["<think>", "</think>", "[THINK]", "[/THINK]"][random.below(4)]),
            _ => {
                let word = format!("w{number}q");
                text.push_str(&word);
                words.push(word);
            }
        }
    }
    (text, words)
}

fn division<'a>(text: &'a str, random: &mut Random) -> Vec<&'a str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let at = rest.ceil_char_boundary(1 + random.below(12).min(rest.len() - 1));
        let (piece, after) = rest.split_at(at);
        pieces.push(piece);
        rest = after;
    }
    pieces
}

fn all_text(out: &[Output]) -> String {
    let mut all = String::new();
    for piece in out {
        match piece {
            Output::Reasoning(text) | Output::Content(text) => all.push_str(text),
            Output::ToolCallStart { id, name, .. } => {
                all.push_str(id);
                all.push_str(name);
            }
            Output::ToolCallArguments { fragment, .. } => all.push_str(fragment),
            Output::ToolCallEnd { .. } => {}
        }
    }
    all
}

#[test]
fn random_outputs() {
    const THINKING: [Option<ReasoningFormat>; 5] = [
        None,
        Some(ReasoningFormat::DeepSeekR1),
        Some(ReasoningFormat::Qwen3),
        Some(ReasoningFormat::KimiK2),
        Some(ReasoningFormat::Mistral),
    ];
    for seed in 0..SEEDS {
        let mut random = Random(seed);
        for tool in formats() {
            let reasoning = THINKING[random.below(THINKING.len())];
            let (text, words) = output(&tool, &mut random);
            let format = Some(tool);
            let whole = parse(&format, reasoning, [text.as_str()]);
            say(&whole);
            let pieces = division(&text, &mut random);
            let divided = parse(&format, reasoning, pieces.iter().copied());
            assert_eq!(divided, whole, "seed {seed}, {format:?}, {reasoning:?}, {pieces:?}");
            let all = all_text(&whole);
            for word in words {
                assert!(
                    all.contains(&word),
                    "seed {seed}, {format:?}: {word} of {text:?} is not in {whole:?}"
                );
            }
        }
    }
}

/// Without a tool format and markers the text is the content, byte for byte.
#[test]
fn plain_text_passes() {
    for seed in 0..500_u64 {
        let mut random = Random(seed);
        let mut text = String::from("x");
        for _ in 0..random.below(60) {
            text.push_str(
                ["a", " ", "\n", "<", "[", "{", "｜", "é", "<tool_cal", "<|", "`"][random.below(11)],
            );
        }
        for tool in formats() {
            let pieces = division(&text, &mut random);
            let out = parse(&Some(tool), None, pieces.iter().copied());
            assert_eq!(out, vec![Output::Content(text.clone())], "seed {seed}");
        }
    }
}

/// Twice the text must not be four times the work: a megabyte, by single characters, in a moment.
#[test]
fn work_is_linear() {
    for tool in formats() {
        let text = markers(&tool).concat().repeat(3_000);
        let step = 1;
        let mut at = 0;
        let mut pieces = Vec::new();
        while at < text.len() {
            let end = text.ceil_char_boundary((at + step).min(text.len()));
            pieces.push(&text[at..end]);
            at = end;
        }
        let begun = std::time::Instant::now();
        parse(&Some(tool.clone()), None, pieces);
        parse(&Some(tool.clone()), None, [text.as_str()]);
        assert!(begun.elapsed().as_secs() < 20, "{tool:?} took {:?}", begun.elapsed());
    }
}
