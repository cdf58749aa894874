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
    /// Its name in logs and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
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
            Self::Embeddings => None,
        }
    }

    /// The path at which engines are asked for it.
    #[must_use]
    pub fn engine_path(self) -> &'static str {
        match self.kind() {
            Some(kind) => kind.path(),
            None => "/v1/embeddings",
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
