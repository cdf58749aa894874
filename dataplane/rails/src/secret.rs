//! The secret that the processes of a cluster share, read from a file or from the environment.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;

use dataplane_fabric::auth::{SharedKey, ShortSecret};

/// Environment variable with the secret, for processes without a file.
pub const SECRET_VARIABLE: &str = "KVASIR_TRANSFER_SECRET";

/// Reason that there is no usable secret. Messages name the file or the variable, never the secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file cannot be read.
    #[error("transfer.secret_file = \"{file}\": {error}")]
    Unreadable {
        /// Path of the file.
        file: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// The file's mode gives permissions to all users. Permissions of the group are allowed.
    #[error("transfer.secret_file = \"{0}\" can be read by all users (chmod 600)")]
    Public(String),
    /// The secret is too short.
    #[error("{place}: {error}")]
    Short {
        /// The file or the variable.
        place: String,
        /// Error that holds the length of the secret in bytes.
        error: ShortSecret,
    },
}

/// Returns the secret of `file`; with an empty name the secret of the environment, or the default key if
/// there is none.
///
/// # Errors
/// [`SecretError`]: a secret that is configured and cannot be used is never ignored.
pub fn shared_key(file: &str) -> Result<SharedKey, SecretError> {
    let (place, secret) = if file.is_empty() {
        let secret = std::env::var_os(SECRET_VARIABLE).unwrap_or_default();
        if secret.is_empty() {
            return Ok(SharedKey::default());
        }
        (SECRET_VARIABLE.to_owned(), secret.as_bytes().to_owned())
    } else {
        let unreadable = |error| SecretError::Unreadable { file: file.to_owned(), error };
        let found = std::fs::metadata(file).map_err(unreadable)?;
        if found.permissions().mode() & 0o007 != 0 {
            return Err(SecretError::Public(file.to_owned()));
        }
        (format!("transfer.secret_file = \"{file}\""), std::fs::read(file).map_err(unreadable)?)
    };
    SharedKey::from_secret(&secret).map_err(|error| SecretError::Short { place, error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_that_cannot_be_used_is_named_and_not_passed_over() {
        let path = std::env::temp_dir().join(format!("kvasir-secret-{}", std::process::id()));
        let file = path.display().to_string();
        let refused = || shared_key(&file).expect_err("no secret").to_string();
        assert!(refused().starts_with(&format!("transfer.secret_file = \"{file}\": No such file")));
        let write = |bytes: &[u8], mode| {
            std::fs::write(&path, bytes).expect("written");
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("set");
        };
        write(&[0xFF; 40], 0o644);
        assert!(refused().ends_with("can be read by all users (chmod 600)"), "{}", refused());
        write(b"short\n", 0o600);
        assert!(refused().ends_with("the secret has 5 bytes; it takes at least 32"), "{}", refused());
        // Any bytes are a valid secret.
        write(&[0xFF; 40], 0o640);
        assert!(shared_key(&file).expect("a secret").is_secret());
        std::fs::remove_file(&path).expect("removed");
    }
}
