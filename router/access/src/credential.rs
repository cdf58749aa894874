//! A client's credential: its place in the request and its kind.
//!
//! A key and a token arrive in the same header, `Authorization: Bearer`, so the form decides: three parts
//! between dots, the first of which decodes to a JSON object's start (`eyJ`), are a token. Keys of
//! `new_key` have no dot.

/// Longest credential that is accepted. Identity providers stay below 8 KiB, as servers bound header lines.
pub const TOKEN_BYTES_MAX: usize = 16 << 10;

/// A presented credential, still unchecked. Its text is not shown in debug output.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Credential<'a> {
    /// A key, for [`crate::KeySet::find`].
    Key(&'a str),
    /// A JSON Web Token, for [`crate::JwtVerifier::verify`].
    Token(&'a str),
    /// No credential was presented.
    Missing,
    /// The credential cannot be valid: empty, too long, or of another scheme than `Bearer`.
    Malformed,
}

impl<'a> Credential<'a> {
    /// Returns the credential in the values of `authorization` (OpenAI's clients) and `x-api-key`
    /// (Anthropic's). When both are present, they must agree.
    #[must_use]
    pub fn from_headers(authorization: Option<&'a str>, api_key: Option<&'a str>) -> Self {
        let bearer = match authorization {
            None => None,
            Some(value) => match value.split_once(' ') {
                Some((scheme, text)) if scheme.eq_ignore_ascii_case("bearer") => Some(text.trim()),
                _ => return Self::Malformed,
            },
        };
        match (bearer, api_key.map(str::trim)) {
            (None, None) => Self::Missing,
            // Both were sent by the client: this comparison reveals nothing to it.
            (Some(first), Some(second)) if first != second => Self::Malformed,
            (Some(text), _) | (None, Some(text)) => Self::classify(text),
        }
    }

    fn classify(text: &'a str) -> Self {
        if text.is_empty()
            || text.len() > TOKEN_BYTES_MAX
            || !text.bytes().all(|byte| byte.is_ascii_graphic())
        {
            return Self::Malformed;
        }
        let is_token = text.starts_with("eyJ") && text.bytes().filter(|&byte| byte == b'.').count() == 2;
        if is_token { Self::Token(text) } else { Self::Key(text) }
    }
}

impl std::fmt::Debug for Credential<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Key(_) => "Key(..)",
            Self::Token(_) => "Token(..)",
            Self::Missing => "Missing",
            Self::Malformed => "Malformed",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_found_and_told_apart() {
        let long = format!("Bearer {}", "x".repeat(TOKEN_BYTES_MAX + 1));
        let cases = [
            (None, None, Credential::Missing),
            (Some("Bearer kv-abc"), None, Credential::Key("kv-abc")),
            (Some("bearer  kv-abc "), None, Credential::Key("kv-abc")),
            (Some("Bearer eyJh.eyJz.sig"), None, Credential::Token("eyJh.eyJz.sig")),
            (Some("Bearer a.b.c"), None, Credential::Key("a.b.c")),
            (Some("Bearer eyJh.x"), None, Credential::Key("eyJh.x")),
            (None, Some("kv-abc"), Credential::Key("kv-abc")),
            (Some("Bearer kv-abc"), Some("kv-abc"), Credential::Key("kv-abc")),
            (Some("Bearer kv-abc"), Some("other"), Credential::Malformed),
            (Some("Basic dTpw"), None, Credential::Malformed),
            (Some("Bearer"), None, Credential::Malformed),
            (Some("Bearer "), None, Credential::Malformed),
            (Some("Bearer a b"), None, Credential::Malformed),
            (Some("Bearer a\nb"), None, Credential::Malformed),
            (Some(long.as_str()), None, Credential::Malformed),
        ];
        for (authorization, api_key, expected) in cases {
            assert_eq!(
                Credential::from_headers(authorization, api_key),
                expected,
                "{authorization:?} {api_key:?}"
            );
        }
    }

    #[test]
    fn debug_output_shows_no_secret() {
        assert_eq!(format!("{:?}", Credential::Key("kv-secret")), "Key(..)");
    }
}
