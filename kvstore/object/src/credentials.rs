//! Credentials for signing requests. Secrets live in [`Secret`], whose `Debug` shows only whether there is one.
//!
//! A credentials file has the format of AWS's (`[profile]`, then `aws_access_key_id = …`); it is read again
//! every minute, so keys can be rotated under a running node. A file that every user may read is refused.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use tokio::time::Instant;

use crate::error::ConfigError;

const REREAD: Duration = Duration::from_secs(60);
const FILE_BYTES_MAX: u64 = 64 << 10;

/// A string that is never printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    #[must_use]
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_empty() { "unset" } else { "set" })
    }
}

/// Source of the credentials.
#[derive(Debug, Clone)]
pub enum Credentials {
    /// The keys themselves, as [`Credentials::from_environment`] returns them.
    Keys {
        /// Access key id.
        access_key_id: Secret,
        /// Secret access key.
        secret_access_key: Secret,
        /// Session token; empty if there is none.
        session_token: Secret,
    },
    /// A file in the format of AWS's `credentials`.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Section of the file, usually `default`.
        profile: String,
    },
    /// Requests are not signed.
    Anonymous,
}

impl Credentials {
    /// Reads `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and, if set, `AWS_SESSION_TOKEN`. Pass
    /// `|name| std::env::var(name).ok()`.
    pub fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let wanted = |name: &'static str| {
            variable(name).filter(|value| !value.is_empty()).ok_or(ConfigError::MissingCredential(name))
        };
        Ok(Self::Keys {
            access_key_id: Secret(wanted("AWS_ACCESS_KEY_ID")?),
            secret_access_key: Secret(wanted("AWS_SECRET_ACCESS_KEY")?),
            session_token: Secret(variable("AWS_SESSION_TOKEN").unwrap_or_default()),
        })
    }

    /// Returns the provider for the client; `None` if requests are not signed. A file is read once here, so
    /// that an invalid one stops start-up.
    pub(crate) fn provider(&self) -> Result<Option<Arc<Provider>>, ConfigError> {
        let (file, credential) = match self {
            Self::Anonymous => return Ok(None),
            Self::Keys { access_key_id, secret_access_key, session_token } => {
                let token = Some(session_token.0.clone()).filter(|token| !token.is_empty());
                let (key_id, secret_key) = (access_key_id.0.clone(), secret_access_key.0.clone());
                (None, AwsCredential { key_id, secret_key, token })
            }
            Self::File { path, profile } => {
                (Some((path.clone(), profile.clone())), read_file(path, profile)?)
            }
        };
        let current = Mutex::new((Instant::now(), Arc::new(credential)));
        Ok(Some(Arc::new(Provider { file, current })))
    }
}

/// Provides credentials to the client.
pub(crate) struct Provider {
    file: Option<(PathBuf, String)>,
    current: Mutex<(Instant, Arc<AwsCredential>)>,
}

impl std::fmt::Debug for Provider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Provider(set)")
    }
}

impl Provider {
    fn current(&self) -> Arc<AwsCredential> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((path, profile)) = &self.file
            && current.0.elapsed() >= REREAD
        {
            // The file may be in the middle of a replacement: the old keys stay until it can be read.
            let credential = read_file(path, profile).map_or_else(|_| current.1.clone(), Arc::new);
            *current = (Instant::now(), credential);
        }
        current.1.clone()
    }
}

// Written out because the trait comes from the macro `async_trait`, which this crate does not need otherwise.
impl CredentialProvider for Provider {
    type Credential = AwsCredential;

    fn get_credential<'life, 'future>(
        &'life self,
    ) -> Pin<Box<dyn Future<Output = object_store::Result<Arc<AwsCredential>>> + Send + 'future>>
    where
        'life: 'future,
        Self: 'future,
    {
        Box::pin(std::future::ready(Ok(self.current())))
    }
}

/// Reads a file after checking its size. The error has the file's path and the kind of the I/O error, never its
/// content.
pub(crate) fn read_small(what: &'static str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    use std::io::Read;
    let unreadable =
        |error: std::io::Error| ConfigError::Unreadable { what, path: path.to_owned(), kind: error.kind() };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    if what == CREDENTIALS_FILE {
        let mode = file.metadata().map_err(unreadable)?.permissions().mode() & 0o777;
        if mode & 0o007 != 0 {
            return Err(ConfigError::WorldReadable { path: path.to_owned(), mode });
        }
    }
    file.take(FILE_BYTES_MAX * 16).read_to_end(&mut bytes).map_err(unreadable)?;
    Ok(bytes)
}

const CREDENTIALS_FILE: &str = "credentials file";

fn read_file(path: &Path, profile: &str) -> Result<AwsCredential, ConfigError> {
    let bytes = read_small(CREDENTIALS_FILE, path)?;
    let text = String::from_utf8_lossy(&bytes);
    let (mut key_id, mut secret_key, mut token, mut within) = (None, None, None, false);
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            within = section.trim() == profile;
        } else if within && let Some((name, value)) = line.split_once('=') {
            let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            match name.trim() {
                "aws_access_key_id" => key_id = value,
                "aws_secret_access_key" => secret_key = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
    }
    Ok(AwsCredential {
        key_id: key_id.ok_or(ConfigError::MissingCredential("aws_access_key_id"))?,
        secret_key: secret_key.ok_or(ConfigError::MissingCredential("aws_secret_access_key"))?,
        token,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;

    #[test]
    fn the_file_is_read_and_an_open_one_refused() {
        let path = std::env::temp_dir().join(format!("kvstore-object-credentials-{}", std::process::id()));
        let text = "[other]\naws_access_key_id = no\n[default]\n# aws_session_token = no\n\
                    aws_access_key_id = AKID\naws_secret_access_key = canary=with=signs\n";
        std::fs::write(&path, text).expect("file written");
        let source = Credentials::File { path: path.clone(), profile: "default".into() };
        for (mode, accepted) in [(0o644, false), (0o604, false), (0o640, true), (0o600, true)] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).expect("own file");
            let provider = source.provider();
            assert_eq!(provider.is_ok(), accepted, "{mode:o}");
            let shown = format!("{source:?} {provider:?}");
            assert!(!shown.contains("canary") && !shown.contains("AKID"), "{shown}");
        }
        let provider = source.provider().expect("mode 600").expect("signs");
        let credential = provider.current();
        assert_eq!((credential.key_id.as_str(), &credential.token), ("AKID", &None));
        assert_eq!(credential.secret_key, "canary=with=signs");
        let missing = Credentials::File { path: path.clone(), profile: "nobody".into() }.provider();
        assert!(matches!(missing, Err(ConfigError::MissingCredential(_))));
        std::fs::remove_file(&path).expect("own file");
        assert!(matches!(source.provider(), Err(ConfigError::Unreadable { .. })));
    }

    #[test]
    fn the_environment_must_have_both_keys() {
        let variable = |name: &str| (name != "AWS_SESSION_TOKEN").then(|| "canary".to_owned());
        let keys = Credentials::from_environment(variable).expect("both are there");
        let shown = format!("{keys:?}");
        assert!(
            shown.contains("secret_access_key: set") && shown.contains("session_token: unset"),
            "{shown}"
        );
        let missing = Credentials::from_environment(|name| name.ends_with("ID").then(|| "x".to_owned()));
        assert_eq!(missing.err(), Some(ConfigError::MissingCredential("AWS_SECRET_ACCESS_KEY")));
    }
}
