//! The grammar of `tracestate` (W3C Trace Context, 3.3.1). What is not valid is not passed on; `traceparent` stays.

/// Longest `tracestate` that is passed on. The recommendation asks for 512 at least.
pub const TRACESTATE_BYTES_MAX: usize = 2048;
/// Most members of the list.
const MEMBERS_MAX: usize = 32;
/// Longest key and value.
const PART_BYTES_MAX: usize = 256;
/// Longest name behind the `@` of a key.
const SYSTEM_BYTES_MAX: usize = 14;

/// Whether a header's value can be passed on. Without members it has nothing to say and is not.
pub(crate) fn is_valid(tracestate: &str) -> bool {
    if tracestate.len() > TRACESTATE_BYTES_MAX {
        return false;
    }
    let members =
        || tracestate.split(',').map(|member| member.trim_matches([' ', '\t'])).filter(|m| !m.is_empty());
    let mut count = 0;
    for member in members() {
        count += 1;
        let Some((key, value)) = member.split_once('=') else { return false };
        // Keys are few: to compare each with those before it needs no memory.
        let again =
            members().take(count - 1).any(|before| before.split_once('=').is_some_and(|b| b.0 == key));
        if count > MEMBERS_MAX || again || !is_key(key) || !is_value(value) {
            return false;
        }
    }
    count > 0
}

fn is_key(key: &str) -> bool {
    let is_rest = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-*/".contains(&byte);
    let is_name = |name: &str| {
        let bytes = name.as_bytes();
        let first = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        bytes.first().is_some_and(first) && bytes.iter().all(|&byte| is_rest(byte))
    };
    key.len() <= PART_BYTES_MAX
        && match key.split_once('@') {
            None => is_name(key),
            Some((tenant, system)) => is_name(tenant) && is_name(system) && system.len() <= SYSTEM_BYTES_MAX,
        }
}

fn is_value(value: &str) -> bool {
    let bytes = value.as_bytes();
    (1..=PART_BYTES_MAX).contains(&bytes.len())
        && bytes.iter().all(|&byte| (b' '..=b'~').contains(&byte) && byte != b'=')
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use opentelemetry::trace::TraceState;

    use super::*;

    #[test]
    fn the_grammar() {
        let many = |count: usize| (0..count).map(|i| format!("k{i}=v")).collect::<Vec<_>>().join(",");
        let valid = [
            "foo=1".to_owned(),
            "foo=1,bar=2".to_owned(),
            "foo=1 \t,\t bar=2,".to_owned(),
            "foo=1,,bar=a b!~".to_owned(),
            "tenant@system=1".to_owned(),
            "0tenant_-*/@sys=1".to_owned(),
            format!("{}=1", "k".repeat(256)),
            format!("k={}", "v".repeat(256)),
            many(32),
        ];
        for text in &valid {
            assert!(is_valid(text), "{text}");
            assert!(TraceState::from_str(text).is_ok(), "the SDK would not export {text}");
        }
        let invalid = [
            String::new(),
            " , ".to_owned(),
            "foo".to_owned(),
            "foo=".to_owned(),
            "=1".to_owned(),
            "Foo=1".to_owned(),
            "foo =1".to_owned(),
            "_foo=1".to_owned(),
            "foo=1=2".to_owned(),
            "foo=ü".to_owned(),
            "foo=a\u{7f}".to_owned(),
            "foo=a\tb".to_owned(),
            "foo=1,foo=2".to_owned(),
            "a@b@c=1".to_owned(),
            "@b=1".to_owned(),
            "a@=1".to_owned(),
            format!("a@{}=1", "s".repeat(15)),
            format!("{}=1", "k".repeat(257)),
            format!("k={}", "v".repeat(257)),
            many(33),
            format!("{}k=1", " ".repeat(TRACESTATE_BYTES_MAX)),
        ];
        for text in &invalid {
            assert!(!is_valid(text), "{text}");
        }
    }
}
