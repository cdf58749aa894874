//! Constrained decoding: keeps an output within a JSON schema.
//!
//! A schema becomes a grammar (`llguidance`). Before each draw the grammar determines the allowed tokens, and the logits of
//! all others become minus infinity. Its state is a function of schema and output, so a request that continues on another
//! worker feeds its tokens so far to a new grammar and draws the same tokens.
//!
//! JSON is written on one line (`{"a": 1, "b": [2, 3]}`): if a grammar allowed any blanks, a model could write blanks without end.
//!
//! Limits: `GRAMMARS_MAX` requests have a grammar at a time, `WAITING_MAX` wait for a place. A grammar has at most
//! `GRAMMAR_SYMBOLS_MAX` symbols and `LEXER_STATES_MAX` states, which its choices share; one that would need more ends its
//! request. `COMPILING_MAX` are compiled at a time, usually for milliseconds; the worst schemas that `router_openai`
//! accepts take tenths of a second. A mask of a usual schema takes microseconds on the engine's thread, at most about 17 ms
//! by the compiler's own limits (`step_lexer_fuel`, `step_max_items`), and the masks of a batch are made one after another.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use router_openai::StructuredOutput;
use router_tokens::ModelText;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore, oneshot};

/// Largest number of requests with a grammar at a time.
pub const GRAMMARS_MAX: usize = 32;
/// Requests that may wait for a place or for their grammar; further ones are refused.
const WAITING_MAX: usize = 1024;
/// Longest wait for a place; after it the request is refused with [`GrammarError::Full`].
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Schemas that are compiled at a time: each needs a processor and some 10 MiB.
const COMPILING_MAX: usize = 2;
/// Part of the compiler's error for a token outside the schema.
const REJECTED: &str = "doesn't satisfy the grammar";
/// Longest message of the compiler, which contains names of the schema.
const MESSAGE_BYTES_MAX: usize = 300;
/// Largest number of states of a grammar's automaton: one or two KiB each.
const LEXER_STATES_MAX: usize = 8192;
/// Largest number of symbols of a grammar's rules.
const GRAMMAR_SYMBOLS_MAX: usize = 100_000;
/// Tokens with more bytes are never chosen, which bounds the depth of the compiler's token tree.
const TOKEN_BYTES_MAX: usize = 1000;
/// Stack of a compiling thread. The compiler recurses through a schema, to a depth that `router_openai` limits. Reserved, not used.
const COMPILER_STACK_BYTES: usize = 64 << 20;

/// Reason for which there is no grammar for an output.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The schema has keywords that a grammar cannot express, or is too large.
    #[error("{0}")]
    Schema(String),
    /// The tokens of the interrupted run do not follow the schema.
    #[error("{0}")]
    Resumed(String),
    /// Too many requests wait for a grammar.
    #[error("too many requests wait for a grammar")]
    Full,
    /// The compiler failed.
    #[error("{0}")]
    Failed(String),
}

/// Reason for which an output cannot be kept within its schema any further.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// The grammar would need more states than it may have.
    #[error("the grammar became too large")]
    Limit,
    /// No token of the vocabulary continues the output within the schema.
    #[error("no token goes on within the schema")]
    DeadEnd,
    /// The token does not follow the schema; a mask would have excluded it.
    #[error("{0}")]
    Rejected(String),
}

/// Makes grammars for one tokenizer.
pub struct GrammarCompiler {
    text: ModelText,
    vocabulary: usize,
    /// Built for the first request: the tree of a large vocabulary takes a second.
    factory: OnceLock<Result<ParserFactory, String>>,
    permits: Arc<Semaphore>,
    waiting: Semaphore,
    compiling: Arc<Semaphore>,
}

impl GrammarCompiler {
    /// Returns a compiler for the first `vocabulary` ids of a tokenizer. Builds nothing before the first request.
    #[must_use]
    pub fn new(text: ModelText, vocabulary: usize) -> Self {
        Self {
            text,
            vocabulary,
            factory: OnceLock::new(),
            permits: Arc::new(Semaphore::new(GRAMMARS_MAX)),
            waiting: Semaphore::new(WAITING_MAX),
            compiling: Arc::new(Semaphore::new(COMPILING_MAX)),
        }
    }

    /// Number of requests that have a place, and of requests that wait for one or for their grammar.
    #[must_use]
    pub fn counts(&self) -> [usize; 2] {
        [GRAMMARS_MAX - self.permits.available_permits(), WAITING_MAX - self.waiting.available_permits()]
    }

    /// Compiles the grammar of an output after these tokens of it. Waits for a place, then compiles on a separate thread, which
    /// keeps the place until it is done even if the request was cancelled.
    pub async fn compile(
        self: &Arc<Self>,
        output: &Arc<StructuredOutput>,
        resumed: Vec<u32>,
    ) -> Result<Grammar, GrammarError> {
        let _waits = self.waiting.try_acquire().map_err(|_| GrammarError::Full)?;
        let closed = |error: AcquireError| GrammarError::Failed(error.to_string());
        let acquire = async {
            let permit = Arc::clone(&self.permits).acquire_owned().await?;
            Ok((permit, Arc::clone(&self.compiling).acquire_owned().await?))
        };
        let acquired = tokio::time::timeout(WAIT_MAX, acquire).await.map_err(|_| GrammarError::Full)?;
        let (permit, compiling) = acquired.map_err(closed)?;
        let (compiler, output) = (Arc::clone(self), Arc::clone(output));
        let (sender, compiled) = oneshot::channel();
        let compile = move || {
            let matcher = compiler.matcher(&output, &resumed);
            drop(compiling);
            // The send fails if the request was cancelled meanwhile.
            let _cancelled =
                sender.send(matcher.map(|matcher| Grammar { matcher, _permit: Arc::new(permit) }));
        };
        std::thread::Builder::new()
            .name("kvasir-grammar".to_owned())
            .stack_size(COMPILER_STACK_BYTES)
            .spawn(compile)
            .map_err(|error| GrammarError::Failed(error.to_string()))?;
        let compiled = compiled.await;
        compiled.unwrap_or_else(|_| {
            Err(GrammarError::Failed("the compiler's thread ended without a result".to_owned()))
        })
    }

    fn matcher(&self, output: &StructuredOutput, resumed: &[u32]) -> Result<Matcher, GrammarError> {
        let factory = self.factory.get_or_init(|| factory(&self.text, self.vocabulary));
        let factory = factory.as_ref().map_err(|error| GrammarError::Failed(error.clone()))?;
        let options = JsonCompileOptions {
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            whitespace_flexible: false,
            lenient: !output.is_strict,
            ..JsonCompileOptions::default()
        };
        let mut schema = output.schema.clone();
        // Replaces the options that the schema itself contains.
        options.apply_to(&mut schema);
        let grammar = TopLevelGrammar::from_json_schema(schema);
        let mut matcher = Matcher::new(factory.create_parser(grammar));
        if let Some(error) = matcher.get_error() {
            return Err(GrammarError::Schema(first_line(&error)));
        }
        if !resumed.is_empty() {
            let consumed = matcher.consume_tokens(resumed);
            consumed.map_err(|error| GrammarError::Resumed(first_line(&error.to_string())))?;
        }
        Ok(matcher)
    }
}

/// State shared by all grammars of a tokenizer: the bytes of its tokens as a tree.
fn factory(text: &ModelText, vocabulary: usize) -> Result<ParserFactory, String> {
    let tokenizer = &text.tokenizer;
    let ends: Vec<u32> = text.eos_ids.iter().copied().filter(|&id| (id as usize) < vocabulary).collect();
    let word = |id: u32| {
        let bytes = tokenizer.bytes_within(id);
        match bytes.len() {
            0 => bytes,
            1..=TOKEN_BYTES_MAX if tokenizer.is_special(id) || ends.contains(&id) => {
                // Not text: a token that begins with the marker byte matches no JSON.
                [&[TokTrie::SPECIAL_TOKEN_MARKER][..], &bytes].concat()
            }
            1..=TOKEN_BYTES_MAX => bytes,
            _ => Vec::new(),
        }
    };
    let Some(&first_end) = ends.first() else {
        return Err("the model has no token that ends an output".to_owned());
    };
    let words: Vec<Vec<u8>> = (0..vocabulary as u32).map(word).collect();
    let trie = TokTrie::from(&TokRxInfo::new(vocabulary as u32, first_end), &words).with_eos_tokens(&ends);
    let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&tokens).map_err(|error| error.to_string())?;
    let limits = factory.limits_mut();
    limits.max_lexer_states = LEXER_STATES_MAX;
    limits.max_grammar_size = GRAMMAR_SYMBOLS_MAX;
    // Verbose errors would contain the schema and the output.
    limits.verbose_errors = false;
    factory.quiet();
    Ok(factory)
}

fn first_line(error: &str) -> String {
    let line = error.lines().next().unwrap_or_default();
    line[..line.floor_char_boundary(MESSAGE_BYTES_MAX)].to_owned()
}

/// State of one output's grammar. A clone is for another output of the same schema.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    /// Place shared by all clones.
    _permit: Arc<OwnedSemaphorePermit>,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Grammar")
    }
}

impl Grammar {
    /// Masks the tokens outside the schema; once the output is complete, all except end tokens.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), StepError> {
        self.check_limit()?;
        let allowed = self.matcher.compute_mask_or_eos();
        self.check_limit()?;
        // Other errors are also limits, of the work for one mask.
        let allowed = allowed.map_err(|_| StepError::Limit)?;
        if allowed.is_zero() {
            return Err(StepError::DeadEnd);
        }
        for (at, logits) in logits.chunks_mut(u32::BITS as usize).enumerate() {
            let word = allowed.as_slice().get(at).copied().unwrap_or(0);
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word & (1 << bit) == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }

    /// Applies the drawn token; true when the output is complete and no token can follow.
    pub fn accept(&mut self, token: u32) -> Result<bool, StepError> {
        let consumed = self.matcher.consume_token(token);
        self.check_limit()?;
        consumed.map_err(|error| {
            let error = first_line(&error.to_string());
            // All other errors are limits (too many items in a row, for example), which have no type.
            if error.contains(REJECTED) { StepError::Rejected(error) } else { StepError::Limit }
        })?;
        Ok(self.matcher.is_stopped())
    }

    /// Checks the limits: after one the matcher would allow only an end.
    fn check_limit(&self) -> Result<(), StepError> {
        match self.matcher.stop_reason() {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => Err(StepError::Limit),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use router_tokens::TINY_VOCABULARY;
    use serde_json::{Value, json};
    use xxhash_rust::xxh3::xxh3_64_with_seed;

    use super::*;

    const END: u32 = 257;

    fn compiler() -> GrammarCompiler {
        GrammarCompiler::new(ModelText::tiny().expect("built in"), TINY_VOCABULARY)
    }

    fn output(schema: Value) -> StructuredOutput {
        StructuredOutput::new("response_format", schema, true).expect("a schema")
    }

    fn grammar(compiler: &GrammarCompiler, schema: Value, resumed: &[u32]) -> Result<Grammar, GrammarError> {
        let permit = Arc::clone(&compiler.permits).try_acquire_owned().expect("a place");
        let matcher = compiler.matcher(&output(schema), resumed)?;
        Ok(Grammar { matcher, _permit: Arc::new(permit) })
    }

    fn allowed(grammar: &mut Grammar) -> Vec<u32> {
        let mut logits = vec![0.0; TINY_VOCABULARY];
        grammar.mask(&mut logits).expect("a mask");
        (0..TINY_VOCABULARY as u32).filter(|&id| logits[id as usize] == 0.0).collect()
    }

    /// Draws an output as a model for which all tokens are equally likely.
    fn draw(grammar: &mut Grammar, seed: u64) -> Vec<u32> {
        let mut tokens = Vec::new();
        for step in 0..500_u64 {
            let choices = allowed(grammar);
            assert!(!choices.is_empty());
            let token =
                choices[(xxh3_64_with_seed(&step.to_le_bytes(), seed) % choices.len() as u64) as usize];
            if token == END {
                return tokens;
            }
            tokens.push(token);
            if grammar.accept(token).expect("an allowed token") {
                return tokens;
            }
        }
        panic!("no end after {} tokens, seed {seed}", tokens.len());
    }

    fn parsed(tokens: &[u32]) -> Value {
        let bytes: Vec<u8> = tokens.iter().map(|&id| u8::try_from(id).expect("a byte")).collect();
        serde_json::from_slice(&bytes)
            .unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(&bytes)))
    }

    type Holds = fn(&Value) -> bool;

    fn case(schema: Value, holds: Holds) -> (Value, Holds) {
        (schema, holds)
    }

    fn schemas() -> Vec<(Value, Holds)> {
        vec![
            case(json!({"const": {"a": [1, null, "é\n"]}}), |value| {
                *value == json!({"a": [1, null, "é\n"]})
            }),
            case(json!({"enum": ["x", 5, false]}), |value| {
                [json!("x"), json!(5), json!(false)].contains(value)
            }),
            case(json!({"type": "integer", "minimum": -3, "maximum": 12}), |value| {
                value.as_i64().is_some_and(|number| (-3..=12).contains(&number))
            }),
            case(json!({"type": "string", "maxLength": 5}), |value| {
                value.as_str().is_some_and(|text| text.chars().count() <= 5)
            }),
            case(json!({"type": "string", "pattern": "^[a-c]{2,4}$"}), |value| {
                let text = value.as_str().unwrap_or_default();
                (2..=4).contains(&text.len()) && text.bytes().all(|byte| (b'a'..=b'c').contains(&byte))
            }),
            case(
                json!({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
                |value| {
                    let items = value.as_array().map_or(&[][..], Vec::as_slice);
                    (1..=3).contains(&items.len()) && items.iter().all(Value::is_boolean)
                },
            ),
            case(
                json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"const": 1}},
                    "required": ["a"], "additionalProperties": false, "$defs": {"n": {"enum": ["p", "q"]}}}),
                |value| {
                    let members = value.as_object().cloned().unwrap_or_default();
                    (value["a"] == "p" || value["a"] == "q")
                        && members.keys().all(|name| name == "a" || name == "b")
                },
            ),
        ]
    }

    #[test]
    fn any_model_says_what_the_schema_allows() {
        let compiler = compiler();
        for (schema, holds) in schemas() {
            let first = grammar(&compiler, schema.clone(), &[]).expect("a grammar");
            for seed in 0..20 {
                let tokens = draw(&mut first.clone(), seed);
                let value = parsed(&tokens);
                assert!(holds(&value), "{schema} does not allow {value}, seed {seed}");
            }
        }
    }

    #[test]
    fn an_output_goes_on_elsewhere_as_it_would_have_gone_on() {
        let compiler = compiler();
        for (schema, _) in schemas() {
            let mut whole = grammar(&compiler, schema.clone(), &[]).expect("a grammar");
            let tokens = draw(&mut whole.clone(), 3);
            for (at, &token) in tokens.iter().enumerate() {
                let mut resumed =
                    grammar(&compiler, schema.clone(), &tokens[..at]).expect("follows the schema");
                assert_eq!(allowed(&mut resumed), allowed(&mut whole), "{schema} behind {at} tokens");
                whole.accept(token).expect("an allowed token");
            }
            let mut complete = grammar(&compiler, schema.clone(), &tokens).expect("follows the schema");
            assert!(allowed(&mut complete).contains(&END), "{schema}");
        }
        let strayed = grammar(&compiler, json!({"type": "object"}), &[u32::from(b'[')]);
        assert!(matches!(strayed, Err(GrammarError::Resumed(_))), "{strayed:?}");
    }

    #[test]
    fn schemas_that_no_grammar_can_follow_are_errors() {
        let compiler = compiler();
        for schema in [
            json!({"type": "integer", "minimum": 5, "maximum": 4}),
            json!({"type": "string", "format": "no such format"}),
            json!({"type": "string", "pattern": "(?=a)b("}),
            json!({"$ref": "#/$defs/missing"}),
            json!({"properties": {"a": {"not": {}}}}),
        ] {
            let refused = grammar(&compiler, schema.clone(), &[]);
            assert!(matches!(refused, Err(GrammarError::Schema(_))), "{schema}: {refused:?}");
        }
        let lenient = StructuredOutput { is_strict: false, ..output(json!({"type": "object", "not": {}})) };
        assert!(compiler.matcher(&lenient, &[]).is_ok(), "left out where the request does not insist");
    }

    #[test]
    fn a_token_that_leaves_the_schema_is_rejected() {
        let mut grammar = grammar(&compiler(), json!({"type": "boolean"}), &[]).expect("a grammar");
        let rejected = grammar.accept(u32::from(b'x'));
        assert!(matches!(rejected, Err(StepError::Rejected(_))), "{rejected:?}");
    }

    #[tokio::test]
    async fn a_grammar_has_a_place_and_gives_it_back() {
        let compiler = Arc::new(compiler());
        let output = Arc::new(output(json!({"type": "boolean"})));
        let mut inside = Vec::new();
        for _ in 0..GRAMMARS_MAX {
            inside.push(compiler.compile(&output, Vec::new()).await.expect("a grammar"));
        }
        let another = inside[0].clone();
        assert_eq!(compiler.permits.available_permits(), 0);
        let mut next = Box::pin(compiler.compile(&output, Vec::new()));
        let early = tokio::time::timeout(Duration::from_millis(20), &mut next).await;
        assert!(early.is_err(), "it waits for a place");
        drop(inside);
        next.await.expect("a grammar");
        drop(another);
        assert_eq!(compiler.permits.available_permits(), GRAMMARS_MAX);
        let bad = Arc::new(StructuredOutput::new("tools", json!({"not": {}}), true).expect("well formed"));
        assert!(matches!(compiler.compile(&bad, Vec::new()).await, Err(GrammarError::Schema(_))));
    }
}
