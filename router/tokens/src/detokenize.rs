//! Text from a stream of token ids, without splitting a character.
//!
//! The text of a token can depend on the token before it (a leading blank), and a character can be spread over several
//! tokens. So a small window of ids is decoded twice, with and without the newest ones, and the difference is returned once it
//! does not end in a partial character.
//!
//! Hot path, once per token and stream: decodes a window of a few ids.

use crate::Tokenizer;

/// Longest time, in tokens, for which an incomplete character is held back; invalid bytes stay invalid.
const HELD_TOKENS_MAX: usize = 8;

/// The state of one stream.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    window: Vec<u32>,
    /// Number of ids of the window whose text was returned.
    given: usize,
}

impl Detokenizer {
    /// Starts a stream that continues after `context`, the last ids before it (a few are enough).
    #[must_use]
    pub fn new(tokenizer: Tokenizer, skip_special: bool, context: &[u32]) -> Self {
        let tail = &context[context.len().saturating_sub(4)..];
        Self { tokenizer, skip_special, window: tail.to_vec(), given: tail.len() }
    }

    /// Adds one token; returns the text that is complete now, possibly empty.
    pub fn push(&mut self, id: u32) -> String {
        self.window.push(id);
        let before = self.tokenizer.decode(&self.window[..self.given], self.skip_special);
        let now = self.tokenizer.decode(&self.window, self.skip_special);
        let held = self.window.len() - self.given;
        if now.ends_with('\u{FFFD}') && held < HELD_TOKENS_MAX {
            return String::new();
        }
        self.advance();
        // The earlier text is normally a prefix; if invalid bytes have changed it, only its length is used.
        now.get(before.len()..).unwrap_or_default().to_owned()
    }

    /// Returns the text that is held back, at the end of the stream.
    pub fn finish(&mut self) -> String {
        let before = self.tokenizer.decode(&self.window[..self.given], self.skip_special);
        let now = self.tokenizer.decode(&self.window, self.skip_special);
        self.advance();
        now.get(before.len()..).unwrap_or_default().to_owned()
    }

    fn advance(&mut self) {
        let keep = self.window.len().min(4);
        self.window.drain(..self.window.len() - keep);
        self.given = self.window.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_add_up_to_the_text() {
        let tokenizer = Tokenizer::bytes();
        for text in ["plain", "naïve 😀 Köln", "<|user|>x</s>", "日本語\n\ttext"] {
            let ids = tokenizer.encode(text, false).expect("bytes");
            for skip_special in [false, true] {
                let mut stream = Detokenizer::new(tokenizer.clone(), skip_special, &[65, 66]);
                let mut out: String = ids.iter().map(|&id| stream.push(id)).collect();
                assert!(!out.contains('\u{FFFD}'), "no half characters: {out}");
                out.push_str(&stream.finish());
                assert_eq!(out, tokenizer.decode(&ids, skip_special));
            }
        }
    }

    #[test]
    fn broken_bytes_are_shown_and_not_held_for_ever() {
        let mut stream = Detokenizer::new(Tokenizer::bytes(), true, &[]);
        let shown: String = (0..20).map(|_| stream.push(0xE3)).collect();
        assert!(shown.contains('\u{FFFD}'));
        assert_eq!(stream.push(u32::from(b'a')).chars().last(), Some('a'));
        let mut stream = Detokenizer::new(Tokenizer::bytes(), true, &[]);
        assert_eq!(stream.push(0xE3), "");
        assert_eq!(stream.finish(), "\u{FFFD}");
    }
}
