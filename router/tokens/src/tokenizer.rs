//! One interface to both tokenizers. Cheap to clone, usable from any thread.

use std::path::Path;
use std::sync::Arc;

use crate::TokensError;
use crate::bytes_tokenizer;
use crate::huggingface::HuggingFace;
use crate::model_text::TINY_VOCABULARY;
use crate::pieces::Pieces;

#[derive(Clone)]
enum Kind {
    Bytes,
    HuggingFace(Arc<HuggingFace>),
}

/// Converts text to token ids and back.
#[derive(Clone)]
pub struct Tokenizer {
    kind: Kind,
    /// Cache of encoded pieces of conversations: of one model, where several share a tokenizer.
    pieces: Option<Arc<Pieces>>,
}

impl Tokenizer {
    /// Returns the tokenizer of the built-in model.
    #[must_use]
    pub fn bytes() -> Self {
        Self { kind: Kind::Bytes, pieces: None }
    }

    /// Loads a `tokenizer.json`. Equal files share what is loaded while one of their tokenizers is in use.
    pub fn from_file(path: &Path) -> Result<Self, TokensError> {
        HuggingFace::load(path).map(|loaded| Self { kind: Kind::HuggingFace(loaded), pieces: None })
    }

    /// Enables a cache of encoded pieces of conversations, of at most `bytes_max` bytes, so that the next turn of a long one encodes
    /// only its tail; false when this tokenizer cannot encode pieces separately. Clones from before have no cache.
    pub fn remember(&mut self, bytes_max: u64) -> bool {
        let Kind::HuggingFace(inner) = &self.kind else { return false };
        let pieces = Pieces::new(&inner.added_tokens(), bytes_max);
        let pieces = pieces.filter(|pieces| pieces.agrees(|text| inner.encode(text, false)));
        self.pieces = pieces.map(Arc::new);
        self.pieces.is_some()
    }

    /// Number of bytes of a text that are not in the cache and that [`Tokenizer::encode`] would have to encode.
    #[must_use]
    pub fn unknown_bytes(&self, text: &str) -> usize {
        match (&self.kind, &self.pieces) {
            // Encoding bytes is about as cheap as a copy.
            (Kind::Bytes, _) => 0,
            (Kind::HuggingFace(_), None) => text.len(),
            (Kind::HuggingFace(_), Some(pieces)) => pieces.unknown_bytes(text),
        }
    }

    /// Token ids of a text. With `add_special_tokens` the tokenizer's own special tokens (often a `<s>`) are added.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokensError> {
        match &self.kind {
            Kind::Bytes => {
                let mut ids = Vec::with_capacity(text.len());
                bytes_tokenizer::encode(text, &mut ids);
                Ok(ids)
            }
            Kind::HuggingFace(inner) => match &self.pieces {
                // A post-processor's special tokens belong to the whole text.
                Some(pieces) if !add_special_tokens => {
                    pieces.encode(text, |piece, ids| inner.encode_into(piece, false, ids))
                }
                _ => inner.encode(text, add_special_tokens),
            },
        }
    }

    /// Text of token ids; incomplete characters become U+FFFD, unknown ids nothing.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids
                    .iter()
                    .filter(|&&id| !(skip_special && self.is_special(id)))
                    .flat_map(|&id| self.bytes_of(id))
                    .collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::HuggingFace(inner) => inner.decode(ids, skip_special),
        }
    }

    /// Bytes of one token.
    #[must_use]
    pub fn bytes_of(&self, id: u32) -> Vec<u8> {
        match &self.kind {
            Kind::Bytes => match u8::try_from(id) {
                Ok(byte) => vec![byte],
                Err(_) => bytes_tokenizer::special_name(id).unwrap_or_default().as_bytes().to_vec(),
            },
            Kind::HuggingFace(inner) => inner.bytes_of(id),
        }
    }

    /// Bytes that a token appends to a non-empty text. Unlike [`Self::bytes_of`] it keeps SentencePiece's leading space.
    #[must_use]
    pub fn bytes_within(&self, id: u32) -> Vec<u8> {
        match &self.kind {
            Kind::Bytes => self.bytes_of(id),
            Kind::HuggingFace(inner) => inner.bytes_within(id),
        }
    }

    /// Whether a token is a special one, which is not part of the text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        match &self.kind {
            Kind::Bytes => bytes_tokenizer::special_name(id).is_some(),
            Kind::HuggingFace(inner) => inner.is_special(id),
        }
    }

    /// The id of a token by its spelling.
    #[must_use]
    pub fn id_of(&self, token: &str) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => bytes_tokenizer::special_id(token),
            Kind::HuggingFace(inner) => inner.id_of(token),
        }
    }

    /// Number of ids: the largest id plus one.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        match &self.kind {
            Kind::Bytes => TINY_VOCABULARY,
            Kind::HuggingFace(inner) => inner.vocabulary,
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Tokenizer({} ids)", self.vocabulary())
    }
}
