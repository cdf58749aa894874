//! Certificates, keys and roots from files, with errors that name the file. Blocking: files are small, but
//! may lie on a slow file system.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{Error, InconsistentKeys};

use crate::error::TlsError;
use crate::format;

/// Largest accepted file, in bytes. A distribution's bundle of roots has about 220 KiB.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Returns the only provider of cryptography.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// Reads a certificate chain with its matching key, and the end of the first certificate's validity.
pub(crate) fn certified_key(
    certificate_file: &Path,
    key_file: &Path,
    provider: &CryptoProvider,
) -> Result<(CertifiedKey, u64), TlsError> {
    let chain = certificates(certificate_file)?;
    let first = chain.first().and_then(|first| format::parse(first));
    let expires_unix =
        first.ok_or_else(|| bad(certificate_file, "its first certificate cannot be read"))?.expires_unix;
    let key = private_key(key_file)?;
    let key = provider
        .key_provider
        .load_private_key(key)
        .map_err(|error| bad(key_file, format!("its private key cannot be used: {error}")))?;
    let certified = CertifiedKey::new(chain, key);
    match certified.keys_match() {
        // A key that does not provide its public half is accepted; aws-lc-rs has no such keys.
        Ok(()) | Err(Error::InconsistentKeys(InconsistentKeys::Unknown)) => Ok((certified, expires_unix)),
        Err(Error::InconsistentKeys(_)) => {
            Err(TlsError::KeyMismatch { certificate: certificate_file.to_owned(), key: key_file.to_owned() })
        }
        Err(error) => Err(bad(certificate_file, format!("its first certificate cannot be used: {error}"))),
    }
}

/// Adds all certificates of a file to the roots.
pub(crate) fn add_roots(roots: &mut RootCertStore, file: &Path) -> Result<(), TlsError> {
    for (index, certificate) in certificates(file)?.into_iter().enumerate() {
        roots
            .add(certificate)
            .map_err(|error| bad(file, format!("certificate {} cannot be a root: {error}", index + 1)))?;
    }
    Ok(())
}

/// Adds the system's roots. Roots that webpki cannot parse are skipped, unless all are.
pub(crate) fn add_system_roots(roots: &mut RootCertStore) -> Result<(), TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let (added, _unknown) = roots.add_parsable_certificates(found.certs);
    if added > 0 {
        return Ok(());
    }
    let reason = found.errors.first().map_or_else(|| "there are none".to_owned(), ToString::to_string);
    Err(TlsError::SystemRoots { reason })
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(file)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| bad(file, pem_reason(&error)))?;
    if found.is_empty() {
        return Err(bad(file, "it holds no certificate in PEM form"));
    }
    Ok(found)
}

fn private_key(file: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    const ENCRYPTED: [&[u8]; 2] = [b"BEGIN ENCRYPTED PRIVATE KEY", b"Proc-Type: 4,ENCRYPTED"];
    let text = read(file)?;
    if ENCRYPTED.iter().any(|mark| text.windows(mark.len()).any(|window| window == *mark)) {
        return Err(bad(file, "its private key is encrypted"));
    }
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
        pem::Error::NoItemsFound => bad(file, "it holds no private key in PEM form"),
        error => bad(file, pem_reason(&error)),
    })
}

/// Returns the reason without the offending line, which may belong to a key.
fn pem_reason(error: &pem::Error) -> &'static str {
    match error {
        pem::Error::MissingSectionEnd { .. } => "a PEM section has no end",
        pem::Error::IllegalSectionStart { .. } => "a PEM section's first line is bad",
        pem::Error::Base64Decode(_) => "a PEM section is not base64",
        _ => "it is not in PEM form",
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let mut text = Vec::new();
    let result = File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text));
    result.map_err(|source| TlsError::Read { path: path.to_owned(), source })?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(bad(path, format!("it is larger than {FILE_BYTES_MAX} bytes")));
    }
    Ok(text)
}

fn bad(path: &Path, reason: impl Into<String>) -> TlsError {
    TlsError::File { path: path.to_owned(), reason: reason.into() }
}

/// Identifies a version of a file. It is of the file at the end of all symbolic links, since the secrets of
/// Kubernetes change by a link to another folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    /// Time of the last change; also moves when only the permissions were corrected.
    changed: (i64, i64),
}

/// Returns the stamps of files; `None` for a file that does not exist.
pub(crate) fn stamps(files: &[PathBuf]) -> Vec<Option<Stamp>> {
    let stamp = |path: &PathBuf| {
        let found = std::fs::metadata(path).ok()?;
        Some(Stamp {
            device: found.dev(),
            inode: found.ino(),
            bytes: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    };
    files.iter().map(stamp).collect()
}
