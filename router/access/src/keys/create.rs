//! Creates a new key, which is shown once and of which only the digest is stored.

use std::fmt::Write as _;

use aws_lc_rs::rand;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::sha256;
use crate::error::Error;
use crate::grant::is_name;

/// Random bytes of a key: as many as the digest has.
const SECRET_BYTES: usize = 32;
/// Prefix of every key, by which scanners of repositories find leaked ones.
const PREFIX: &str = "kvasir-";

/// A new key. Debug output does not show its secret.
#[derive(Clone)]
pub struct NewKey {
    /// The key that the client presents. It is stored nowhere else.
    pub secret: String,
    /// The lines for the keys file.
    pub lines: String,
}

impl std::fmt::Debug for NewKey {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("NewKey").field("lines", &self.lines).finish_non_exhaustive()
    }
}

/// Creates a random key with its lines for the keys file.
///
/// # Errors
///
/// [`Error::Config`] when a name cannot be written to the file, [`Error::Random`] when there are no random
/// bytes.
pub fn new_key(name: &str, tenant: &str) -> Result<NewKey, Error> {
    for (what, text) in [("a key's name", name), ("a key's tenant", tenant)] {
        if !is_name(text) {
            return Err(Error::Config {
                what,
                reason: "it is empty, too long or has control characters".to_owned(),
            });
        }
    }
    let mut bytes = [0; SECRET_BYTES];
    rand::fill(&mut bytes).map_err(|_| Error::Random)?;
    let secret = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes));
    let digest = sha256(secret.as_bytes()).iter().fold(String::new(), |mut hex, byte| {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    let (name, tenant) = (toml::Value::from(name), toml::Value::from(tenant));
    let lines =
        format!("[[key]]\nname = {name}\ntenant = {tenant}\nsha256 = \"{digest}\"\nmodels = [\"*\"]\n");
    Ok(NewKey { secret, lines })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeySet;

    #[test]
    fn a_new_key_is_found_in_its_own_file() {
        for (name, tenant) in [("app", "acme"), ("it's", "a \"quoted\" \\ name"), ("ü", "''' \"\"\"")] {
            let key = new_key(name, tenant).expect("key");
            assert_eq!(key.secret.len(), PREFIX.len() + 43);
            assert!(!key.lines.contains(&key.secret) && !format!("{key:?}").contains(&key.secret));
            let keys = KeySet::parse(&key.lines).expect("its lines are a keys file");
            let grant = keys.find(&key.secret, 0).expect("found");
            assert_eq!((&*grant.name, &*grant.tenant), (name, tenant));
        }
        let secrets = [(); 2].map(|()| new_key("a", "b").expect("key").secret);
        assert_ne!(secrets[0], secrets[1]);
        assert!(new_key("a\nb", "c").is_err());
    }
}
