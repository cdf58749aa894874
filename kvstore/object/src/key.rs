//! Keys of objects: `<prefix>/v1/<layout fingerprint>/<2 hex>/<32 hex of the run's last identity>.kvr`.
//!
//! The two hex digits spread the keys over 256 folders, so that a sweep goes folder by folder and a directory
//! stays small.

use kvstore_block::BlockIdentity;

const SUFFIX: &str = ".kvr";

/// Folder of all objects of a prefix, whatever their layout.
#[must_use]
pub(crate) fn root(prefix: &str) -> String {
    format!("{prefix}/v1")
}

/// Key of the run that ends with a block.
#[must_use]
pub fn object_key(prefix: &str, layout_fingerprint: u64, last: BlockIdentity) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(last.0));
    format!("{prefix}/v1/{layout_fingerprint:016x}/{}/{hex}{SUFFIX}", &hex[..2])
}

/// Whether a key has the form of [`object_key`] under this prefix: a sweep deletes no other objects.
#[must_use]
pub(crate) fn is_object_key(prefix: &str, key: &str) -> bool {
    let hex = |part: &str, digits: usize| {
        part.len() == digits && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let Some(rest) = key.strip_prefix(&root(prefix)).and_then(|rest| rest.strip_prefix('/')) else {
        return false;
    };
    let mut parts = rest.split('/');
    let (Some(layout), Some(folder), Some(name), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let Some(identity) = name.strip_suffix(SUFFIX) else { return false };
    hex(layout, 16) && hex(folder, 2) && hex(identity, 32) && identity.starts_with(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_recognised_and_strangers_are_not() {
        let mut identity = BlockIdentity([0; 16]);
        identity.0[0] = 0xab;
        identity.0[15] = 1;
        let key = object_key("a/b", 0x1234, identity);
        assert_eq!(key, "a/b/v1/0000000000001234/ab/ab000000000000000000000000000001.kvr");
        assert!(is_object_key("a/b", &key));
        assert!(!is_object_key("a", &key));
        for stranger in [
            key.replace("/ab/", "/ac/"),
            key.replace(".kvr", ".txt"),
            format!("{key}/x"),
            "a/b/v1/readme".into(),
        ] {
            assert!(!is_object_key("a/b", &stranger), "{stranger}");
        }
    }
}
