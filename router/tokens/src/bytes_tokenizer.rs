//! The tokenizer of the built-in model: one id per byte, then the special tokens.

use crate::model_text::TINY_SPECIALS;

const FIRST_SPECIAL: u32 = 256;

pub(crate) fn encode(text: &str, ids: &mut Vec<u32>) {
    let mut rest = text;
    'text: while !rest.is_empty() {
        if rest.starts_with('<') {
            for (index, special) in TINY_SPECIALS.iter().enumerate() {
                if let Some(after) = rest.strip_prefix(special) {
                    ids.push(FIRST_SPECIAL + index as u32);
                    rest = after;
                    continue 'text;
                }
            }
        }
        let first = rest.chars().next().map_or(1, char::len_utf8);
        let next = rest[first..].find('<').map_or(rest.len(), |at| at + first);
        let (here, after) = rest.split_at(next);
        ids.extend(here.bytes().map(u32::from));
        rest = after;
    }
}

pub(crate) fn special_name(id: u32) -> Option<&'static str> {
    TINY_SPECIALS.get(id.checked_sub(FIRST_SPECIAL)? as usize).copied()
}

pub(crate) fn special_id(name: &str) -> Option<u32> {
    TINY_SPECIALS.iter().position(|special| *special == name).map(|at| FIRST_SPECIAL + at as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_specials() {
        let mut ids = Vec::new();
        encode("<|user|>hé<b<s>", &mut ids);
        let expected: Vec<u32> =
            [258, u32::from(b'h'), 0xC3, 0xA9, u32::from(b'<'), u32::from(b'b'), 256].to_vec();
        assert_eq!(ids, expected);
        encode("é<é", &mut ids);
        assert_eq!(special_id("</s>"), Some(257));
        assert_eq!(special_name(260), Some("<|system|>"));
        assert_eq!(special_name(9999), None);
    }
}
