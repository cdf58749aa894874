//! Outputs of a mock: a function of the preceding tokens, so that every worker gives the same output and a
//! continuation on another worker goes on with the same text.
//!
//! The state is a hash of all tokens so far, prompt and output alike; the next token is drawn from it. The
//! whole output is known before its first token is due: the scheduler only decides *when* tokens are sent.

use router_tokens::{Detokenizer, ModelText, StopStrings};

use crate::fault::mix;

/// Most token ids from which outputs are drawn.
const ALPHABET_MAX: usize = 4096;
/// Ids of a vocabulary that are searched for the alphabet.
const SCANNED_IDS_MAX: usize = 65_536;
/// Bytes that need escapes in JSON or could begin a special token.
const EXCLUDED_BYTES: &[u8] = b"\"\\<";
const MULTIPLIER: u64 = 0x9FB2_1C65_1E98_DF25;

/// The alphabet of tokens from which outputs are drawn.
#[derive(Debug)]
pub(crate) struct OutputGenerator {
    alphabet: Vec<u32>,
    /// Whether every token of the alphabet is one byte, which allows a fast path from tokens to text.
    is_bytes: bool,
    eos: Option<u32>,
    eos_one_in: u64,
}

/// Reason for which an output ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The token limit.
    Length,
    /// The model's end-of-sequence token.
    Eos,
    /// A stop token, by its id.
    StopToken(u32),
    /// A stop string.
    StopString(String),
}

/// A complete output.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    /// Bytes of the text that may be shown after each token; empty: one byte per token.
    cuts: Vec<usize>,
    pub(crate) ending: Ending,
}

impl Output {
    /// Returns the bytes of the text that may be shown after `tokens` tokens.
    pub(crate) fn shown(&self, tokens: usize) -> usize {
        if tokens >= self.tokens.len() {
            return self.text.len();
        }
        match tokens.checked_sub(1) {
            None => 0,
            Some(_) if self.cuts.is_empty() => tokens.min(self.text.len()),
            Some(last) => self.cuts[last],
        }
    }
}

/// Conditions that end an output.
#[derive(Debug, Clone, Default)]
pub(crate) struct Limits {
    pub(crate) max_tokens: usize,
    pub(crate) min_tokens: usize,
    pub(crate) ignore_eos: bool,
    pub(crate) stop: Vec<String>,
    pub(crate) include_stop: bool,
    pub(crate) stop_token_ids: Vec<u32>,
}

/// The hash of a sequence, token by token.
#[derive(Debug, Clone, Copy)]
struct State(u64);

impl State {
    fn of(tokens: &[u32]) -> Self {
        let mut state = Self(0x1337);
        tokens.iter().for_each(|&token| state.push(token));
        state
    }

    #[inline]
    fn push(&mut self, token: u32) {
        self.0 = (self.0 ^ u64::from(token).wrapping_add(1)).wrapping_mul(MULTIPLIER).rotate_left(29);
    }
}

impl OutputGenerator {
    pub(crate) fn new(text: &ModelText, eos_one_in: u64) -> Self {
        let plain = |id: &u32| {
            if text.tokenizer.is_special(*id) {
                return false;
            }
            let bytes = text.tokenizer.bytes_of(*id);
            !bytes.is_empty()
                && bytes.iter().all(|byte| matches!(byte, b' '..=b'~') && !EXCLUDED_BYTES.contains(byte))
        };
        let scanned = text.tokenizer.vocabulary().min(SCANNED_IDS_MAX) as u32;
        let mut alphabet: Vec<u32> = (0..scanned).filter(plain).take(ALPHABET_MAX).collect();
        if alphabet.is_empty() {
            alphabet.push(0);
        }
        let is_bytes = alphabet.iter().all(|&id| text.tokenizer.bytes_of(id) == [id as u8] && id < 256);
        Self { alphabet, is_bytes, eos: text.eos_ids.first().copied(), eos_one_in }
    }

    /// Returns the next token; `None` is the end.
    #[inline]
    fn next(&self, state: State, may_end: bool) -> Option<u32> {
        let hash = mix(state.0);
        if may_end && self.eos_one_in != 0 && (hash >> 32).is_multiple_of(self.eos_one_in) {
            return None;
        }
        Some(self.alphabet[(((hash & 0xFFFF_FFFF) * self.alphabet.len() as u64) >> 32) as usize])
    }

    /// Returns the output that follows a prompt.
    pub(crate) fn generate_output(&self, text: &ModelText, prompt: &[u32], limits: &Limits) -> Output {
        let mut state = State::of(prompt);
        let mut tokens = Vec::with_capacity(limits.max_tokens.min(4096));
        let mut ending = Ending::Length;
        while tokens.len() < limits.max_tokens {
            let is_early = tokens.len() < limits.min_tokens;
            let may_end = !limits.ignore_eos && !is_early && self.eos.is_some();
            let Some(token) = self.next(state, may_end) else {
                tokens.extend(self.eos);
                ending = Ending::Eos;
                break;
            };
            tokens.push(token);
            state.push(token);
            if !is_early && limits.stop_token_ids.contains(&token) {
                ending = Ending::StopToken(token);
                break;
            }
        }
        self.render(text, prompt, tokens, ending, limits)
    }

    /// Returns an output with this text, as far as the limits allow.
    pub(crate) fn forced_output(&self, text: &ModelText, words: &str, limits: &Limits) -> Output {
        let mut tokens = text.tokenizer.encode(words, false).unwrap_or_default();
        let mut ending = Ending::Eos;
        if tokens.len() >= limits.max_tokens {
            tokens.truncate(limits.max_tokens);
            ending = Ending::Length;
        } else {
            tokens.extend(self.eos);
        }
        let limits = Limits { stop: Vec::new(), ..limits.clone() };
        self.render(text, &[], tokens, ending, &limits)
    }

    fn render(
        &self,
        text: &ModelText,
        prompt: &[u32],
        mut tokens: Vec<u32>,
        mut ending: Ending,
        limits: &Limits,
    ) -> Output {
        let silent = usize::from(ending == Ending::Eos && self.eos.is_some());
        let spoken = tokens.len() - silent;
        let is_ascii = |token: &u32| (0x20..0x7F).contains(token);
        if self.is_bytes && limits.stop.is_empty() && tokens[..spoken].iter().all(is_ascii) {
            let text = tokens[..spoken].iter().map(|&token| char::from(token as u8)).collect();
            return Output { tokens, text, cuts: Vec::new(), ending };
        }
        let mut stream = Detokenizer::new(text.tokenizer.clone(), true, prompt);
        let mut stops = StopStrings::new(limits.stop.clone(), limits.include_stop);
        let (mut shown, mut cuts) = (String::new(), Vec::with_capacity(tokens.len()));
        let mut all = String::new();
        for index in 0..spoken {
            let piece = stream.push(tokens[index]);
            all.push_str(&piece);
            let (piece, is_found) = stops.push(&piece);
            shown.push_str(&piece);
            cuts.push(shown.len());
            if is_found {
                tokens.truncate(index + 1);
                let found = limits.stop.iter().filter(|stop| all.contains(stop.as_str()));
                ending = Ending::StopString(
                    found.min_by_key(|stop| all.find(stop.as_str())).cloned().unwrap_or_default(),
                );
                return Output { tokens, text: shown, cuts, ending };
            }
        }
        shown.push_str(&stops.push(&stream.finish()).0);
        shown.push_str(&stops.finish());
        cuts.resize(tokens.len(), shown.len());
        Output { tokens, text: shown, cuts, ending }
    }

    /// Returns simulated log-probabilities: of the token, then of the alternatives in falling order.
    pub(crate) fn logprobs(&self, token: u32, position: usize, alternatives: usize) -> Vec<(u32, f32)> {
        let hash = mix(u64::from(token) << 32 | position as u64);
        let first = -((hash % 32) as f32) / 64.0;
        let own = std::iter::once((token, first));
        let others = self.alphabet.iter().cycle().skip((hash >> 32) as usize % self.alphabet.len());
        let others = others.filter(move |&&other| other != token).take(self.alphabet.len().saturating_sub(1));
        let others = others.zip(1..).map(|(&other, rank)| (other, first - rank as f32 * 0.5));
        own.chain(others.take(alternatives.saturating_sub(1))).collect()
    }

    /// Returns a vector of length one that depends only on the tokens.
    pub(crate) fn embedding(tokens: &[u32], dimensions: usize) -> Vec<f32> {
        let mut random = State::of(tokens).0;
        let draw = |_| (crate::fault::split_mix(&mut random) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        let mut vector: Vec<f32> = (0..dimensions).map(draw).collect();
        let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
        vector.iter_mut().for_each(|x| *x /= length);
        vector
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_continuation_goes_on_where_the_output_was_cut() {
        let text = ModelText::tiny().expect("tiny");
        let generator = OutputGenerator::new(&text, 40);
        for prompt in 0..50_u32 {
            let limits = |max_tokens| Limits { max_tokens, ..Limits::default() };
            let prompt = vec![prompt, 7, 9];
            let whole = generator.generate_output(&text, &prompt, &limits(60));
            assert!(!whole.text.contains(['<', '"', '\\']), "{}", whole.text);
            for cut in 0..whole.tokens.len() {
                let resumed: Vec<u32> = prompt.iter().chain(&whole.tokens[..cut]).copied().collect();
                let rest = generator.generate_output(&text, &resumed, &limits(60 - cut));
                assert_eq!(rest.tokens, whole.tokens[cut..]);
                assert_eq!(rest.ending, whole.ending);
                assert_eq!(whole.text[whole.shown(cut)..], rest.text);
            }
        }
    }

    #[test]
    fn outputs_end_where_they_are_told_to() {
        let text = ModelText::tiny().expect("tiny");
        let generator = OutputGenerator::new(&text, 4);
        let ask = |limits: Limits| generator.generate_output(&text, &[1, 2, 3], &limits);
        let whole = ask(Limits { max_tokens: 40, ignore_eos: true, ..Limits::default() });
        assert_eq!((whole.tokens.len(), whole.ending), (40, Ending::Length));
        assert_eq!(ask(Limits { max_tokens: 400, ..Limits::default() }).ending, Ending::Eos);
        let stop = whole.text[10..12].to_owned();
        let at = whole.text.find(&stop).expect("is there");
        let stopped =
            ask(Limits { max_tokens: 40, ignore_eos: true, stop: vec![stop.clone()], ..Limits::default() });
        assert_eq!((stopped.text.as_str(), stopped.ending), (&whole.text[..at], Ending::StopString(stop)));
        let token = whole.tokens[5];
        let limits =
            Limits { max_tokens: 40, ignore_eos: true, stop_token_ids: vec![token], ..Limits::default() };
        assert_eq!(ask(limits).ending, Ending::StopToken(token));
        let unit = OutputGenerator::embedding(&[1, 2], 8).iter().map(|x| x * x).sum::<f32>();
        assert!((unit - 1.0).abs() < 1e-5);
        let logprobs = generator.logprobs(65, 3, 5);
        assert!(logprobs.len() == 5 && logprobs.is_sorted_by(|a, b| a.1 > b.1));
    }
}
