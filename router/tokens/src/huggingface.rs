//! Loading `tokenizer.json`.
//!
//! Two properties of the pinned release candidate need care. Existing files carry version 1.0 and must be canonicalised
//! first. And a `Split` whose pattern is not one of the built-in grammars loads but refuses every text (its reader never
//! compiles the pattern); such a pre-tokenizer is rebuilt here.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokenizers::models::bpe::PipelineBPE;
use tokenizers::pipeline::{
    EncodeOptions, Override, PipelineModel, PipelineNormalizer, PipelinePostProcessor, PipelinePreTokenizer,
    PipelineToken, PipelineTokenizer,
};
use tokenizers::pre_tokenizers::sequence::PipelineSequence;
use tokenizers::pre_tokenizers::split::{Search, Split};
use tokenizers::vocab::bucket_added_vocabulary::AddedToken;

use crate::TokensError;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Loaded tokenizers by a hash of their file: models of one family have equal files, and need one tokenizer.
static LOADED: Mutex<Vec<(blake3::Hash, Weak<HuggingFace>)>> = Mutex::new(Vec::new());

pub(crate) struct HuggingFace {
    pub(crate) pipeline: PipelineTokenizer,
    ids: HashMap<String, u32>,
    pub(crate) vocabulary: usize,
}

impl HuggingFace {
    /// Loads a file, or returns the tokenizer of an equal file that is loaded already.
    pub(crate) fn load(path: &Path) -> Result<Arc<Self>, TokensError> {
        let text = std::fs::read_to_string(path).map_err(|error| TokensError::file(path, error))?;
        let hash = blake3::hash(text.as_bytes());
        let known = |loaded: &[(blake3::Hash, Weak<Self>)]| {
            loaded.iter().find_map(|(known, tokenizer)| (*known == hash).then(|| tokenizer.upgrade())?)
        };
        if let Some(tokenizer) = known(&LOADED.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(tokenizer);
        }
        // Not under the lock: of two threads that load one file at the same time, one's result is dropped.
        let this = Arc::new(Self::parse(text).map_err(|error| TokensError::file(path, error))?);
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tokenizer) = known(&loaded) {
            return Ok(tokenizer);
        }
        loaded.retain(|(_, tokenizer)| tokenizer.strong_count() > 0);
        loaded.push((hash, Arc::downgrade(&this)));
        Ok(this)
    }

    fn parse(text: String) -> Result<Self, AnyError> {
        let canonical = tokenizers::canonicalize_str(&text)?;
        drop(text);
        let this = Self::from_canonical(&canonical)?;
        this.encode("a 1", false)?;
        Ok(this)
    }

    fn from_canonical(text: &str) -> Result<Self, AnyError> {
        let pipeline = repaired(tokenizers::from_json(text)?)?;
        let mut ids: HashMap<String, u32> = match pipeline.get_model() {
            PipelineModel::BPE(model) => model.to_config()?.vocab.into_iter().collect(),
            PipelineModel::Unigram(model) => model.get_vocab().into_iter().collect(),
            PipelineModel::WordLevel(model) => model.get_vocab().into_iter().collect(),
            PipelineModel::WordPiece(model) => model.vocab().into_iter().collect(),
        };
        for (id, token) in pipeline.get_added_vocabulary().get_added_tokens_decoder() {
            ids.insert(token.content.clone(), id);
        }
        let vocabulary = ids.values().max().map_or(0, |&id| id as usize + 1);
        Ok(Self { pipeline, ids, vocabulary })
    }

    /// Tokens that are taken out of a text before it is encoded.
    pub(crate) fn added_tokens(&self) -> Vec<AddedToken> {
        let added = self.pipeline.get_added_vocabulary().get_added_tokens_decoder();
        added.into_iter().map(|(_, token)| token.clone()).collect()
    }

    pub(crate) fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokensError> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.encode_into(text, add_special_tokens, &mut ids)?;
        Ok(ids)
    }

    pub(crate) fn encode_into(
        &self,
        text: &str,
        add_special_tokens: bool,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokensError> {
        let options = EncodeOptions {
            add_special_tokens,
            // A special token spelled out in a prompt becomes that token, as in engines.
            encode_special_tokens: false,
            padding: Override::Off,
            truncation: Override::Off,
        };
        let mut tokens: Vec<PipelineToken> = Vec::with_capacity(text.len() / 3);
        self.pipeline
            .encode_into(text, &options, &mut tokens)
            .map_err(|error| TokensError::Encode(error.to_string()))?;
        ids.extend(tokens.into_iter().map(u32::from));
        Ok(())
    }

    pub(crate) fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        self.pipeline.decode(ids, skip_special).unwrap_or_default()
    }

    pub(crate) fn id_of(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        let added = self.pipeline.get_added_vocabulary();
        added.simple_id_to_token(id).is_some_and(|token| added.is_special_token(&token))
    }

    /// Bytes that a token appends to a non-empty text. Unlike [`Self::bytes_of`] it keeps SentencePiece's leading space, and
    /// `<0xNN>` is that byte.
    pub(crate) fn bytes_within(&self, id: u32) -> Vec<u8> {
        let is_added = self.pipeline.get_added_vocabulary().simple_id_to_token(id).is_some();
        let piece = self.pipeline.get_model().id_to_token(id).filter(|_| !is_added);
        // A byte-level vocabulary has no `▁` and no `<0xNN>`; a piece that decodes to itself is literal text.
        let spelled = piece.and_then(|piece| {
            let bytes = sentence_piece(&piece)?;
            (self.decode(&[id], false).as_bytes() != piece.as_bytes()).then_some(bytes)
        });
        spelled.unwrap_or_else(|| self.bytes_of(id))
    }

    /// Bytes of a token on its own.
    pub(crate) fn bytes_of(&self, id: u32) -> Vec<u8> {
        let added = self.pipeline.get_added_vocabulary();
        if let Some(special) = added.simple_id_to_token(id) {
            return special.into_bytes();
        }
        let text = self.decode(&[id], false);
        let Some(piece) = self.pipeline.get_model().id_to_token(id) else { return text.into_bytes() };
        // Byte-level pieces are spelled in a separate alphabet, whole characters or not.
        let bytes: Option<Vec<u8>> = piece.chars().map(byte_level_byte).collect();
        match bytes {
            Some(bytes) if String::from_utf8_lossy(&bytes) == text => bytes,
            _ => text.into_bytes(),
        }
    }
}

/// Bytes of a piece in SentencePiece's spelling: blanks as `▁`, single bytes as `<0xNN>`.
fn sentence_piece(piece: &str) -> Option<Vec<u8>> {
    let byte = piece.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|hex| hex.len() == 2);
    match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => Some(vec![byte]),
        None => piece.contains('\u{2581}').then(|| piece.replace('\u{2581}', " ").into_bytes()),
    }
}

/// Byte of a character of the byte-level alphabet (GPT-2's `bytes_to_unicode`, inverted).
fn byte_level_byte(character: char) -> Option<u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let code = u32::from(character);
    if let Ok(byte) = u8::try_from(code) {
        return printable(byte).then_some(byte);
    }
    let nth = code.checked_sub(256)? as usize;
    (0..=255_u8).filter(|&byte| !printable(byte)).nth(nth)
}

fn is_broken(pre_tokenizer: &PipelinePreTokenizer) -> bool {
    match pre_tokenizer {
        PipelinePreTokenizer::Split(split) => {
            let built_in = split.grammar().is_some()
                && !split.invert
                && split.behavior == tokenizers::SplitDelimiterBehavior::Isolated;
            matches!(split.search, Search::Unavailable) && !built_in
        }
        PipelinePreTokenizer::Sequence(sequence) => {
            !sequence.is_deepseek() && sequence.pre_tokenizers().iter().any(is_broken)
        }
        _ => false,
    }
}

fn rebuilt(pre_tokenizer: &PipelinePreTokenizer) -> Result<PipelinePreTokenizer, AnyError> {
    Ok(match pre_tokenizer {
        PipelinePreTokenizer::Split(split) => {
            PipelinePreTokenizer::Split(Split::new(split.pattern.clone(), split.behavior, split.invert)?)
        }
        PipelinePreTokenizer::Sequence(sequence) => {
            let parts = sequence.pre_tokenizers().iter().map(rebuilt).collect::<Result<Vec<_>, _>>()?;
            PipelinePreTokenizer::Sequence(PipelineSequence::new(parts))
        }
        other => other.clone(),
    })
}

fn repaired(tokenizer: PipelineTokenizer) -> Result<PipelineTokenizer, AnyError> {
    if !is_broken(tokenizer.get_pre_tokenizer()) {
        return Ok(tokenizer);
    }
    let PipelineModel::BPE(model) = tokenizer.get_model() else {
        return Err("a Split by regular expression on a model that is not BPE is not supported".into());
    };
    let normalizers =
        tokenizer.get_normalizers().iter().map(cloned_normalizer).collect::<Result<Vec<_>, _>>()?;
    let post = tokenizer.get_post_processor();
    Ok(PipelineTokenizer::from_parts(
        tokenizer.get_added_vocabulary().clone(),
        normalizers,
        rebuilt(tokenizer.get_pre_tokenizer())?,
        PipelineModel::BPE(PipelineBPE::from_config(model.to_config()?)?),
        PipelinePostProcessor { single: post.single.clone(), pair: post.pair.clone() },
        tokenizer.get_decoder().cloned(),
        tokenizer.get_role_to_token().clone(),
        tokenizer.get_padding().cloned(),
        tokenizer.get_truncation().cloned(),
    ))
}

fn cloned_normalizer(normalizer: &PipelineNormalizer) -> Result<PipelineNormalizer, AnyError> {
    use PipelineNormalizer as N;
    Ok(match normalizer {
        N::NFC(inner) => N::NFC(*inner),
        N::NFD(inner) => N::NFD(*inner),
        N::NFKC(inner) => N::NFKC(*inner),
        N::NFKD(inner) => N::NFKD(*inner),
        N::Metaspace(inner) => N::Metaspace(inner.clone()),
        N::Prepend(inner) => N::Prepend(inner.clone()),
        N::Strip(inner) => N::Strip(*inner),
        other => return Err(format!("normalizer {other:?} with a foreign regular expression").into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_files_share_one_tokenizer() {
        let golden =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/golden/llama/tokenizer.json");
        let text = std::fs::read_to_string(&golden).expect("the fixture");
        let load = |path: &Path| HuggingFace::load(path).expect("it loads");
        let first = load(&golden);
        let copy = std::env::temp_dir().join(format!("kvasir-tokenizer-{}.json", std::process::id()));
        std::fs::write(&copy, &text).expect("a copy");
        assert!(Arc::ptr_eq(&first, &load(&copy)));
        std::fs::write(&copy, format!("{text}\n")).expect("another file in its place");
        let other = load(&copy);
        assert!(!Arc::ptr_eq(&first, &other));
        let unused = Arc::downgrade(&other);
        drop(other);
        assert!(unused.upgrade().is_none(), "a tokenizer that nobody uses is kept");
        std::fs::write(&copy, "{}").expect("a broken file");
        assert!(HuggingFace::load(&copy).is_err());
        std::fs::remove_file(&copy).expect("removed");
    }

    #[test]
    fn sentence_pieces_keep_their_blanks_and_bytes() {
        for (piece, expected) in [
            ("\u{2581}the", Some(&b" the"[..])),
            ("\u{2581}\u{2581}", Some(&b"  "[..])),
            ("<0xE3>", Some(&b"\xE3"[..])),
            ("<0xZZ>", None),
            ("the", None),
        ] {
            assert_eq!(sentence_piece(piece).as_deref(), expected, "{piece}");
        }
    }

    #[test]
    fn the_byte_level_alphabet_covers_every_byte_once() {
        let mut seen = [false; 256];
        for code in 0..400_u32 {
            let Some(byte) = char::from_u32(code).and_then(byte_level_byte) else { continue };
            assert!(!std::mem::replace(&mut seen[usize::from(byte)], true), "byte {byte} twice");
        }
        assert!(seen.iter().all(|&seen| seen));
        assert_eq!(byte_level_byte('Ġ'), Some(b' '));
        assert_eq!(byte_level_byte('Ċ'), Some(b'\n'));
    }
}
