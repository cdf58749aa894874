//! The surfaces of the API: what a client may ask for, and over which path.

/// What an engine generates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/completions`.
    Completion,
    /// `/v1/chat/completions`.
    Chat,
}

/// A surface of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surface {
    /// OpenAI's chat completions.
    Chat,
    /// OpenAI's completions.
    Completions,
    /// OpenAI's embeddings.
    Embeddings,
    /// Documents ranked by a query, as Jina and Cohere ask for it.
    Rerank,
    /// How near texts are to each other.
    Score,
    /// The tokens of a text or a chat, as vLLM gives them.
    Tokenize,
    /// The text of tokens.
    Detokenize,
    /// A text that is spoken, as OpenAI asks for it.
    Speech,
    /// The text of a recording, as OpenAI asks for it.
    Transcription,
    /// The same in English.
    Translation,
    /// Anthropic's messages.
    Messages,
    /// Anthropic's count of a message's tokens.
    CountTokens,
    /// OpenAI's responses.
    Responses,
    /// Completions over KServe's gRPC protocol.
    KServe,
}

impl Surface {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::Chat,
        Self::Completions,
        Self::Embeddings,
        Self::Rerank,
        Self::Score,
        Self::Tokenize,
        Self::Detokenize,
        Self::Speech,
        Self::Transcription,
        Self::Translation,
        Self::Messages,
        Self::CountTokens,
        Self::Responses,
        Self::KServe,
    ];

    /// The surface's name in logs and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Rerank => "rerank",
            Self::Score => "score",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
            Self::Speech => "speech",
            Self::Transcription => "transcription",
            Self::Translation => "translation",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
            Self::Responses => "responses",
            Self::KServe => "kserve",
        }
    }

    /// What engines generate for it; `None` for what is not generated token by token.
    #[must_use]
    pub fn kind(self) -> Option<Kind> {
        match self {
            Self::Chat | Self::Messages | Self::CountTokens | Self::Responses => Some(Kind::Chat),
            Self::Completions | Self::KServe => Some(Kind::Completion),
            Self::Embeddings
            | Self::Rerank
            | Self::Score
            | Self::Tokenize
            | Self::Detokenize
            | Self::Speech
            | Self::Transcription
            | Self::Translation => None,
        }
    }

    /// The path at which clients ask for it; the first where there are several, and empty where it is none of HTTP.
    #[must_use]
    pub fn client_path(self) -> &'static str {
        match self {
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
            Self::Responses => "/v1/responses",
            Self::KServe => "",
            _ => self.engine_path(),
        }
    }

    /// Whether an engine's accelerator computes something for it.
    #[must_use]
    pub fn is_computed(self) -> bool {
        !matches!(self, Self::Tokenize | Self::Detokenize | Self::CountTokens)
    }

    /// Whether clients send a form with a recording, not JSON.
    #[must_use]
    pub fn takes_recording(self) -> bool {
        matches!(self, Self::Transcription | Self::Translation)
    }

    /// Whether an answer may be something else than JSON: sound, or a text as it is.
    #[must_use]
    pub fn is_audio(self) -> bool {
        self == Self::Speech || self.takes_recording()
    }

    /// The path at which engines are asked for it.
    #[must_use]
    pub fn engine_path(self) -> &'static str {
        match self {
            Self::Rerank => "/v1/rerank",
            Self::Score => "/v1/score",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
            Self::Speech => "/v1/audio/speech",
            Self::Transcription => "/v1/audio/transcriptions",
            Self::Translation => "/v1/audio/translations",
            Self::Embeddings => "/v1/embeddings",
            Self::Completions | Self::KServe => Kind::Completion.path(),
            Self::Chat | Self::Messages | Self::CountTokens | Self::Responses => Kind::Chat.path(),
        }
    }

    /// Whether it is Anthropic's, whose errors have a shape of their own.
    #[must_use]
    pub fn is_anthropic(self) -> bool {
        matches!(self, Self::Messages | Self::CountTokens)
    }
}

impl Kind {
    /// The path at which engines answer it.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Completion => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_surfaces_are_listed_in_their_order() {
        for (place, surface) in Surface::ALL.into_iter().enumerate() {
            assert_eq!(surface as usize, place, "{surface:?}");
            assert!(surface.engine_path().starts_with('/') && !surface.name().is_empty());
        }
        // Whatever is declared last is listed, so all are.
        assert_eq!(Surface::ALL.last(), Some(&Surface::KServe));
    }
}
