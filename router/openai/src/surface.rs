//! The surfaces of the API and their paths.

/// Kind of generation that an engine runs.
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
    /// Ranking of documents by a query, in the form of Jina and Cohere.
    Rerank,
    /// Similarity scores of texts.
    Score,
    /// Tokenisation of a text or a chat, in vLLM's form.
    Tokenize,
    /// Conversion of tokens to text.
    Detokenize,
    /// Speech from text, in OpenAI's form.
    Speech,
    /// Transcription of a recording, in OpenAI's form.
    Transcription,
    /// Transcription of a recording, translated to English.
    Translation,
    /// Anthropic's messages.
    Messages,
    /// Anthropic's token count of a message.
    CountTokens,
    /// OpenAI's responses.
    Responses,
    /// Completions over KServe's gRPC protocol.
    KServe,
}

impl Surface {
    /// All surfaces.
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

    /// Kind of generation for the surface; `None` if nothing is generated token by token.
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

    /// Path that clients request; the first of several, and empty for a surface that is not HTTP.
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

    /// Whether an engine's accelerator computes the answer.
    #[must_use]
    pub fn is_computed(self) -> bool {
        !matches!(self, Self::Tokenize | Self::Detokenize | Self::CountTokens)
    }

    /// Whether the request is a form with a recording instead of JSON.
    #[must_use]
    pub fn takes_recording(self) -> bool {
        matches!(self, Self::Transcription | Self::Translation)
    }

    /// Whether an answer may be sound or plain text instead of JSON.
    #[must_use]
    pub fn is_audio(self) -> bool {
        self == Self::Speech || self.takes_recording()
    }

    /// Path of requests to engines.
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

    /// Whether the surface is Anthropic's, whose errors have another format.
    #[must_use]
    pub fn is_anthropic(self) -> bool {
        matches!(self, Self::Messages | Self::CountTokens)
    }
}

impl Kind {
    /// Path at which engines serve the surface.
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
        // The last declared surface is listed, so all are.
        assert_eq!(Surface::ALL.last(), Some(&Surface::KServe));
    }
}
