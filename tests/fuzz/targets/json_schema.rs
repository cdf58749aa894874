//! JSON schemas from arbitrary bytes; accepted schemas are compiled and followed for some tokens: no panic (a
//! release build aborts on a panic), bounded time, and every token that a mask allows is accepted.
//!
//! The bytes choose keywords and their values, valid and invalid ones. An input that is JSON is used as it
//! is.

#![no_main]

use std::sync::{Arc, OnceLock};

use router_openai::StructuredOutput;
use router_tokens::{ModelText, TINY_VOCABULARY};
use serde_json::{Map, Value, json};
use tools_grammar::{GrammarCompiler, StepError};

const DEPTH_MAX: usize = 12;
const TOKENS_MAX: usize = 48;

const KEYWORDS: [&str; 34] = [
    "type",
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "items",
    "prefixItems",
    "additionalItems",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "enum",
    "const",
    "$ref",
    "$defs",
    "definitions",
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "x-guidance",
    "$id",
];
const TEXTS: [&str; 40] = [
    "string",
    "number",
    "integer",
    "object",
    "array",
    "boolean",
    "null",
    "a",
    "b",
    "",
    "é",
    "\u{1f980}",
    "\"",
    "#",
    "#/$defs/a",
    "#/$defs/b",
    "#/definitions/a",
    "#/properties/a",
    "#/$defs/a/items",
    "date",
    "date-time",
    "time",
    "uuid",
    "email",
    "ipv4",
    "ipv6",
    "uri",
    "hostname",
    "duration",
    "^a*$",
    "[^b]{2,9}",
    "(a|b)+c?",
    "\\d{3}",
    ".",
    "(?i)x",
    "\\p{L}+",
    "a{1000}",
    "((a{30}){30}){30}",
    "(?=a)",
    "[",
];
const NUMBERS: [&str; 22] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "100",
    "1000",
    "2147483647",
    "2147483648",
    "9007199254740993",
    "-9223372036854775808",
    "18446744073709551615",
    "0.1",
    "-0.5",
    "1e-6",
    "0.000003",
    "9999.999999",
    "1e18",
    "-1e18",
    "1e300",
    "5e-324",
];

/// The bytes that make the choices; zeros after their end.
struct Choices<'a>(std::slice::Iter<'a, u8>);

impl Choices<'_> {
    fn byte(&mut self) -> usize {
        self.0.next().copied().map_or(0, usize::from)
    }

    fn one_of<'t>(&mut self, of: &[&'t str]) -> &'t str {
        of[self.byte() % of.len()]
    }

    fn number(&mut self) -> Value {
        serde_json::from_str(self.one_of(&NUMBERS)).unwrap_or(Value::Null)
    }

    fn value(&mut self, depth: usize) -> Value {
        match self.byte() % 8 {
            0 => Value::Null,
            1 => Value::Bool(self.byte() % 2 == 0),
            2 | 3 => self.number(),
            4 | 5 => self.one_of(&TEXTS).into(),
            6 if depth < DEPTH_MAX => (0..self.byte() % 4).map(|_| self.value(depth + 1)).collect(),
            _ if depth < DEPTH_MAX => self.schema(depth + 1),
            _ => Value::Null,
        }
    }

    fn named(&mut self, depth: usize) -> Value {
        let members = (0..self.byte() % 4).map(|_| (self.one_of(&TEXTS).to_owned(), self.schema(depth + 1)));
        Value::Object(members.collect())
    }

    fn schema(&mut self, depth: usize) -> Value {
        if depth >= DEPTH_MAX || self.byte() % 8 == 0 {
            return Value::Bool(true);
        }
        let mut keywords = Map::new();
        for _ in 0..1 + self.byte() % 5 {
            let keyword = self.one_of(&KEYWORDS);
            let value = match keyword {
                _ if self.byte() % 16 == 0 => self.value(depth + 1),
                "properties" | "patternProperties" | "$defs" | "definitions" => self.named(depth),
                "additionalProperties" | "items" | "additionalItems" | "not" | "if" | "then" => {
                    self.schema(depth + 1)
                }
                "anyOf" | "oneOf" | "allOf" | "prefixItems" => {
                    (0..1 + self.byte() % 3).map(|_| self.schema(depth + 1)).collect()
                }
                "required" | "enum" => {
                    (0..1 + self.byte() % 3).map(|_| Value::from(self.one_of(&TEXTS))).collect()
                }
                "type" | "$ref" | "pattern" | "format" | "$id" => self.one_of(&TEXTS).into(),
                "const" | "x-guidance" => self.value(depth + 1),
                _ => self.number(),
            };
            keywords.insert(keyword.to_owned(), value);
        }
        Value::Object(keywords)
    }
}

fn compiler() -> &'static Arc<GrammarCompiler> {
    static COMPILER: OnceLock<Arc<GrammarCompiler>> = OnceLock::new();
    COMPILER
        .get_or_init(|| Arc::new(GrammarCompiler::new(ModelText::tiny().expect("built in"), TINY_VOCABULARY)))
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let mut choices = Choices(input.iter());
    let is_strict = choices.byte() % 2 == 0;
    let schema = serde_json::from_slice(input).unwrap_or_else(|_| match choices.schema(0) {
        Value::Bool(is_any) => json!({ "additionalProperties": is_any }),
        schema => schema,
    });
    let Ok(output) = StructuredOutput::new("response_format", schema, is_strict) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let grammar = runtime.block_on(compiler().compile(&Arc::new(output), Vec::new()));
    let Ok(mut grammar) = grammar else { return };
    let mut logits = vec![0.0_f32; TINY_VOCABULARY];
    for _ in 0..TOKENS_MAX {
        logits.fill(0.0);
        match grammar.mask(&mut logits) {
            Ok(()) => {}
            Err(StepError::Limit | StepError::DeadEnd) => return,
            Err(error) => panic!("{error}"),
        }
        let allowed: Vec<u32> =
            (0..TINY_VOCABULARY as u32).filter(|&id| logits[id as usize] == 0.0).collect();
        let token = allowed[(choices.byte() * 257 + choices.byte()) % allowed.len()];
        match grammar.accept(token) {
            Ok(false) => {}
            Ok(true) | Err(StepError::Limit) => return,
            Err(error) => panic!("the mask allowed {token}, then: {error}"),
        }
    }
});
