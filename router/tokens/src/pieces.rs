//! Encoding a conversation piece by piece, with a memory for pieces.
//!
//! A tokenizer takes special tokens out of a text first and encodes what lies between them separately. So a text may be cut
//! before any special token, and the ids of the pieces are the ids of the text: each piece begins with its special token,
//! and only the first piece is the beginning of a text. A conversation's next turn differs in its last pieces; the others
//! are looked up. A piece is compared letter by letter, since a hash alone could be made to collide.
//!
//! Special tokens that reach beyond themselves (`lstrip`, `single_word`) or are looked for in normalised text are no places
//! to cut. When a sample comes out differently, the tokenizer is not fed in pieces at all ([`Pieces::agrees`]).

use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokenizers::vocab::bucket_added_vocabulary::AddedToken;

use crate::TokensError;

/// Shorter pieces cost less to encode than to remember.
const REMEMBERED_BYTES_MIN: usize = 64;
/// Overhead of an entry, about.
const ENTRY_BYTES: u64 = 128;
/// Length of an entry that the table is laid out for.
const ENTRY_BYTES_TYPICAL: u64 = 2048;

#[derive(Debug, Clone)]
struct Bytes;

impl Weighter<Box<str>, Arc<[u32]>> for Bytes {
    fn weight(&self, text: &Box<str>, ids: &Arc<[u32]>) -> u64 {
        text.len() as u64 + 4 * ids.len() as u64 + ENTRY_BYTES
    }
}

pub(crate) struct Pieces {
    tokens: AhoCorasick,
    /// By pattern: whether a text may be cut before it.
    is_cut: Vec<bool>,
    samples: Vec<String>,
    memory: Cache<Box<str>, Arc<[u32]>, Bytes>,
}

impl Pieces {
    /// `None` when there is no special token to cut at.
    pub(crate) fn new(added: &[AddedToken], bytes_max: u64) -> Option<Self> {
        let added: Vec<&AddedToken> =
            added.iter().filter(|token| !token.content.is_empty() && !token.normalized).collect();
        let is_cut: Vec<bool> =
            added.iter().map(|token| token.special && !token.lstrip && !token.single_word).collect();
        // The same rule as the tokenizer's own search.
        let contents = added.iter().map(|token| &token.content);
        let tokens = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents).ok()?;
        let cuts = added.iter().zip(&is_cut).filter(|(_, is_cut)| **is_cut);
        let samples: Vec<String> = cuts.map(|(token, _)| token.content.clone()).collect();
        if samples.is_empty() {
            return None;
        }
        let items = (bytes_max / ENTRY_BYTES_TYPICAL).max(16) as usize;
        Some(Self { tokens, is_cut, samples, memory: Cache::with_weighter(items, bytes_max, Bytes) })
    }

    /// Whether pieces come out as wholes do, on texts that have every special token in places that matter.
    pub(crate) fn agrees(&self, encode: impl Fn(&str) -> Result<Vec<u32>, TokensError>) -> bool {
        let sample = |token: &String| {
            format!(" Hi  there{token}user\nIt's 12345 é世\n {token}\n\n tail. {token}{token}x\n")
        };
        self.samples.iter().take(64).map(sample).all(|text| {
            let whole = encode(&text).ok();
            let mut pieces = Vec::new();
            for piece in self.cut(&text) {
                let Ok(ids) = encode(piece) else { return false };
                pieces.extend(ids);
            }
            whole == Some(pieces)
        })
    }

    fn cut<'a>(&'a self, text: &'a str) -> impl Iterator<Item = &'a str> {
        let cuts = self.tokens.find_iter(text).filter(|found| self.is_cut[found.pattern().as_usize()]);
        let mut start = 0;
        let ends = cuts.map(|found| found.start()).filter(|&at| at > 0).chain([text.len()]);
        ends.filter_map(move |end| {
            let piece = &text[start..end];
            start = end;
            (!piece.is_empty()).then_some(piece)
        })
    }

    pub(crate) fn encode(
        &self,
        text: &str,
        encode: impl Fn(&str, &mut Vec<u32>) -> Result<(), TokensError>,
    ) -> Result<Vec<u32>, TokensError> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        for piece in self.cut(text) {
            if piece.len() < REMEMBERED_BYTES_MIN {
                encode(piece, &mut ids)?;
            } else if let Some(known) = self.memory.get(piece) {
                ids.extend_from_slice(&known);
            } else {
                let before = ids.len();
                encode(piece, &mut ids)?;
                self.memory.insert(piece.into(), ids[before..].into());
            }
        }
        Ok(ids)
    }

    /// Bytes that would have to be encoded.
    pub(crate) fn unknown_bytes(&self, text: &str) -> usize {
        let is_known = |piece: &str| piece.len() >= REMEMBERED_BYTES_MIN && self.memory.peek(piece).is_some();
        self.cut(text).filter(|piece| !is_known(piece)).map(str::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn token(content: &str) -> AddedToken {
        AddedToken { normalized: false, ..AddedToken::from(content, true) }
    }

    fn pieces(bytes_max: u64) -> Pieces {
        let stripping = AddedToken { lstrip: true, ..token("<strip>") };
        Pieces::new(&[token("<a>"), token("<ab>"), stripping], bytes_max).expect("tokens to cut at")
    }

    #[test]
    fn texts_are_cut_before_special_tokens() {
        let pieces = pieces(1 << 20);
        for (text, expected) in [
            ("", vec![]),
            ("x", vec!["x"]),
            ("<a>x<a>", vec!["<a>x", "<a>"]),
            ("x <strip>y<ab>z<b>", vec!["x <strip>y", "<ab>z<b>"]),
            ("<a><a>é", vec!["<a>", "<a>é"]),
        ] {
            assert_eq!(pieces.cut(text).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_next_turn_encodes_its_tail_alone() {
        let pieces = pieces(1 << 20);
        let worked = Cell::new(0);
        let encode = |text: &str, ids: &mut Vec<u32>| {
            worked.set(worked.get() + text.len());
            ids.extend(text.bytes().map(u32::from));
            Ok(())
        };
        let long = "word ".repeat(1000);
        let first = format!("<a>{long}<ab>");
        let second = format!("{first}{long}<a>tail");
        for text in [&first, &second] {
            let ids = pieces.encode(text, encode).expect("encodes");
            assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>());
        }
        assert_eq!(worked.get(), first.len() + long.len() + "<ab>".len() + "<a>tail".len());
        assert_eq!(pieces.unknown_bytes(&second), "<a>tail".len());
    }

    #[test]
    fn memory_is_bounded() {
        let pieces = pieces(64 << 10);
        for number in 0..1000 {
            let text = format!("<a>{number}{}", "x".repeat(500));
            let encode = |text: &str, ids: &mut Vec<u32>| {
                ids.extend(text.bytes().map(u32::from));
                Ok(())
            };
            pieces.encode(&text, encode).expect("encodes");
        }
        assert!(pieces.memory.weight() <= 64 << 10, "{}", pieces.memory.weight());
        assert!(!pieces.memory.is_empty());
    }

    #[test]
    fn a_tokenizer_that_looks_across_pieces_is_found_out() {
        let pieces = pieces(1 << 20);
        assert!(pieces.agrees(|text| Ok(text.bytes().map(u32::from).collect())));
        assert!(!pieces.agrees(|text| Ok(vec![text.len() as u32])));
    }
}
