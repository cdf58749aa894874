//! One interface to both tokenizers. Cheap to clone, usable from any thread.

use std::path::Path;
use std::sync::Arc;

use crate::TokensError;
use crate::bytes_tokenizer;
use crate::huggingface::HuggingFace;
use crate::model_text::TINY_VOCABULARY;

#[derive(Clone)]
enum Kind {
    Bytes,
    HuggingFace(Arc<HuggingFace>),
}

/// Converts text to token ids and back.
#[derive(Clone)]
pub struct Tokenizer(Kind);

impl Tokenizer {
    /// Returns the tokenizer of the built-in model.
    #[must_use]
    pub fn bytes() -> Self {
        Self(Kind::Bytes)
    }

    /// Loads a `tokenizer.json`.
    pub fn from_file(path: &Path) -> Result<Self, TokensError> {
        HuggingFace::load(path).map(|loaded| Self(Kind::HuggingFace(Arc::new(loaded))))
    }

    /// Enables a cache of encoded pieces of conversations, so that the next turn of a long one encodes only its tail; false when
    /// this tokenizer cannot. Must be called before it is shared.
    pub fn remember(&mut self, bytes_max: u64) -> bool {
        match &mut self.0 {
            Kind::Bytes => false,
            Kind::HuggingFace(inner) => Arc::get_mut(inner).is_some_and(|inner| inner.remember(bytes_max)),
        }
    }

    /// Number of bytes of a text that [`Tokenizer::encode`] would have to encode.
    #[must_use]
    pub fn unknown_bytes(&self, text: &str) -> usize {
        match &self.0 {
            // Encoding bytes is about as cheap as a copy.
            Kind::Bytes => 0,
            Kind::HuggingFace(inner) => inner.unknown_bytes(text),
        }
    }

    /// Token ids of a text. With `add_special_tokens` the tokenizer's own special tokens (often a `<s>`) are added.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokensError> {
        match &self.0 {
            Kind::Bytes => {
                let mut ids = Vec::with_capacity(text.len());
                bytes_tokenizer::encode(text, &mut ids);
                Ok(ids)
            }
            Kind::HuggingFace(inner) => inner.encode(text, add_special_tokens),
        }
    }

    /// Text of token ids; incomplete characters become U+FFFD, unknown ids nothing.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        match &self.0 {
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
        match &self.0 {
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
        match &self.0 {
            Kind::Bytes => self.bytes_of(id),
            Kind::HuggingFace(inner) => inner.bytes_within(id),
        }
    }

    /// Whether a token is a special one, which is not part of the text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        match &self.0 {
            Kind::Bytes => bytes_tokenizer::special_name(id).is_some(),
            Kind::HuggingFace(inner) => inner.is_special(id),
        }
    }

    /// The id of a token by its spelling.
    #[must_use]
    pub fn id_of(&self, token: &str) -> Option<u32> {
        match &self.0 {
            Kind::Bytes => bytes_tokenizer::special_id(token),
            Kind::HuggingFace(inner) => inner.id_of(token),
        }
    }

    /// Number of ids: the largest id plus one.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        match &self.0 {
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
