//! Redis's glob patterns: `*`, `?`, `[a-z]`, `[^a]` and a backslash before a literal character.
//!
//! Matches in a loop that backtracks to the last star only: patterns like `a*a*a*b`, which take a recursive
//! matcher exponential time, take at most length of the key times length of the pattern here.

/// Whether a key matches a pattern.
pub(crate) fn fits(pattern: &[u8], key: &[u8]) -> bool {
    let (mut in_pattern, mut in_key) = (0, 0);
    // Backtracking position after the last star: in the pattern, and in the key, one byte further each time.
    let mut star: Option<(usize, usize)> = None;
    loop {
        if pattern.get(in_pattern) == Some(&b'*') {
            in_pattern += 1;
            star = Some((in_pattern, in_key));
            continue;
        }
        let step = match (in_pattern < pattern.len(), key.get(in_key)) {
            (false, None) => return true,
            (true, Some(&byte)) => one(&pattern[in_pattern..], byte),
            _ => None,
        };
        match (step, star) {
            (Some(length), _) => {
                in_pattern += length;
                in_key += 1;
            }
            (None, Some((after, from))) if from < key.len() => {
                star = Some((after, from + 1));
                (in_pattern, in_key) = (after, from + 1);
            }
            _ => return false,
        }
    }
}

/// Returns the length of the pattern's first element if it matches the byte.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match (pattern[0], pattern.get(1)) {
        (b'?', _) => Some(1),
        (b'\\', Some(&literal)) => (literal == byte).then_some(2),
        (b'[', _) => set(pattern, byte),
        (literal, _) => (literal == byte).then_some(1),
    }
}

fn set(pattern: &[u8], byte: u8) -> Option<usize> {
    let negated = pattern.get(1) == Some(&b'^');
    let mut at = 1 + usize::from(negated);
    let mut found = false;
    while let Some(&first) = pattern.get(at) {
        if first == b']' {
            return (found != negated).then_some(at + 1);
        }
        let escaped = usize::from(first == b'\\' && at + 1 < pattern.len());
        let low = pattern[at + escaped];
        at += 1 + escaped;
        let high = match (pattern.get(at), pattern.get(at + 1)) {
            (Some(b'-'), Some(&high)) if high != b']' => {
                at += 2;
                high
            }
            _ => low,
        };
        found |= (low.min(high)..=low.max(high)).contains(&byte);
    }
    // An open bracket extends to the end, as in Redis.
    (found != negated).then_some(pattern.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_redis_matches() {
        let cases = [
            ("*", "", true),
            ("*", "anything", true),
            ("h?llo", "hello", true),
            ("h?llo", "hllo", false),
            ("h*llo", "heeeello", true),
            ("h[ae]llo", "hallo", true),
            ("h[ae]llo", "hillo", false),
            ("h[^e]llo", "hallo", true),
            ("h[^e]llo", "hello", false),
            ("h[a-b]llo", "hbllo", true),
            ("h[b-a]llo", "hallo", true),
            ("h\\*llo", "h*llo", true),
            ("h\\*llo", "hello", false),
            ("[\\]]", "]", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-b-b-", false),
            ("", "", true),
            ("", "a", false),
            ("a", "", false),
            ("**a", "bba", true),
            ("[a", "a", true),
        ];
        for (pattern, key, expected) in cases {
            assert_eq!(fits(pattern.as_bytes(), key.as_bytes()), expected, "{pattern} {key}");
        }
        let slow = [b"a*".repeat(30), b"b".to_vec()].concat();
        assert!(!fits(&slow, &[b'a'; 2000]), "and at once");
    }
}
