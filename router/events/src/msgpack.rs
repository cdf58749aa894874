//! A cursor over msgpack that comes from a wire: every length is checked against the bytes that are there, and
//! skipping needs no recursion. Format: <https://github.com/msgpack/msgpack/blob/master/spec.md>.

use crate::error::WireError;

type Result<T> = std::result::Result<T, WireError>;

const NIL: u8 = 0xC0;

/// A cursor. The readers return `None`, without moving, when a value is of another kind, except that nil is consumed.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    /// Offset in the payload at which the bytes end.
    end: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, end: bytes.len() }
    }

    pub(crate) fn position(&self) -> usize {
        self.end - self.bytes.len()
    }

    pub(crate) fn bad(&self, what: &'static str) -> WireError {
        WireError { what, at: self.position(), event: None, field: None }
    }

    #[inline]
    pub(crate) fn peek(&self) -> Result<u8> {
        self.bytes.first().copied().ok_or_else(|| self.bad("the bytes end too early"))
    }

    #[inline]
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (taken, rest) =
            self.bytes.split_at_checked(len).ok_or_else(|| self.bad("the bytes end too early"))?;
        self.bytes = rest;
        Ok(taken)
    }

    /// A big-endian number of up to eight bytes.
    #[inline]
    fn big_endian(&mut self, width: usize) -> Result<u64> {
        let bytes = self.take(width)?;
        let mut wide = [0; 8];
        wide[8 - width..].copy_from_slice(bytes);
        Ok(u64::from_be_bytes(wide))
    }

    /// An unsigned integer in one of the forms that token ids have; `None`, without moving, for anything else.
    #[inline]
    pub(crate) fn token(&mut self) -> Option<u32> {
        let (value, rest) = match *self.bytes {
            [small @ 0x00..=0x7F, ref rest @ ..] => (u32::from(small), rest),
            [0xCD, high, low, ref rest @ ..] => (u32::from(u16::from_be_bytes([high, low])), rest),
            [0xCE, a, b, c, d, ref rest @ ..] => (u32::from_be_bytes([a, b, c, d]), rest),
            [0xCC, byte, ref rest @ ..] => (u32::from(byte), rest),
            _ => return None,
        };
        self.bytes = rest;
        Some(value)
    }

    /// Returns the next value as a separate cursor, and moves past it.
    pub(crate) fn delimited(&mut self) -> Result<(Self, &'a [u8])> {
        let before = *self;
        self.skip()?;
        let bytes = &before.bytes[..before.bytes.len() - self.bytes.len()];
        Ok((Self { bytes, end: self.position() }, bytes))
    }

    pub(crate) fn array(&mut self) -> Result<Option<usize>> {
        self.sequence(0x90, 0xDC, 1, "an array longer than its bytes")
    }

    pub(crate) fn map(&mut self) -> Result<Option<usize>> {
        self.sequence(0x80, 0xDE, 2, "a map longer than its bytes")
    }

    /// Reads a header of `fix | length`, `wide` with 16 bits, or the next marker with 32. Every element takes `least` bytes at
    /// least, so a length beyond the payload is found here.
    #[inline]
    fn sequence(&mut self, fix: u8, wide: u8, least: usize, too_long: &'static str) -> Result<Option<usize>> {
        let before = *self;
        let len = match self.peek()? {
            short if short & 0xF0 == fix => {
                self.bytes = &self.bytes[1..];
                usize::from(short & 0x0F)
            }
            marker if marker == wide || marker == wide + 1 => {
                self.bytes = &self.bytes[1..];
                self.big_endian(if marker == wide { 2 } else { 4 })? as usize
            }
            _ => return Ok(None),
        };
        if len.saturating_mul(least) > self.bytes.len() {
            return Err(before.bad(too_long));
        }
        Ok(Some(len))
    }

    pub(crate) fn number(&mut self) -> Result<f64> {
        match self.peek()? {
            0xCB => {
                self.bytes = &self.bytes[1..];
                Ok(f64::from_bits(self.big_endian(8)?))
            }
            0xCA => {
                self.bytes = &self.bytes[1..];
                Ok(f64::from(f32::from_bits(self.big_endian(4)? as u32)))
            }
            _ => {
                let missing = self.bad("a number is missing");
                Ok(self.integer()?.ok_or(missing)? as f64)
            }
        }
    }

    /// Any integer; unsigned ones above the signed range keep their bits.
    #[inline]
    pub(crate) fn integer(&mut self) -> Result<Option<i64>> {
        let marker = self.peek()?;
        let width = match marker {
            0x00..=0x7F | 0xE0..=0xFF => 0,
            0xCC | 0xD0 => 1,
            0xCD | 0xD1 => 2,
            0xCE | 0xD2 => 4,
            0xCF | 0xD3 => 8,
            NIL => {
                self.bytes = &self.bytes[1..];
                return Ok(None);
            }
            _ => return Ok(None),
        };
        self.bytes = &self.bytes[1..];
        let bits = self.big_endian(width)?;
        Ok(Some(match marker {
            0x00..=0x7F | 0xE0..=0xFF => i64::from(marker as i8),
            0xD0 => i64::from(bits as i8),
            0xD1 => i64::from(bits as i16),
            0xD2 => i64::from(bits as i32),
            _ => bits as i64,
        }))
    }

    /// Reads an integer, or bytes, of which the last eight count, as engines shorten them themselves.
    pub(crate) fn hash(&mut self) -> Result<Option<u64>> {
        let width = match self.peek()? {
            0xC4 => 1,
            0xC5 => 2,
            0xC6 => 4,
            _ => return Ok(self.integer()?.map(|value| value as u64)),
        };
        self.bytes = &self.bytes[1..];
        let len = self.big_endian(width)? as usize;
        let bytes = self.take(len)?;
        let low = &bytes[len.saturating_sub(8)..];
        Ok(Some(low.iter().fold(0, |hash, &byte| hash << 8 | u64::from(byte))))
    }

    pub(crate) fn is_text(&self) -> bool {
        matches!(self.bytes.first(), Some(0xA0..=0xBF | 0xD9..=0xDB))
    }

    /// A string, or nil as `None`.
    pub(crate) fn text(&mut self) -> Result<Option<&'a str>> {
        let marker = self.peek()?;
        let width = match marker {
            0xA0..=0xBF => 0,
            0xD9 => 1,
            0xDA => 2,
            0xDB => 4,
            NIL => {
                self.bytes = &self.bytes[1..];
                return Ok(None);
            }
            _ => return Ok(None),
        };
        let before = *self;
        self.bytes = &self.bytes[1..];
        let len = if width == 0 { usize::from(marker & 0x1F) } else { self.big_endian(width)? as usize };
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map(Some).map_err(|_| before.bad("a string is not UTF-8"))
    }

    /// Skips one value of any kind, however deep, without recursion.
    pub(crate) fn skip(&mut self) -> Result<()> {
        let mut left = 1_u64;
        while left > 0 {
            left -= 1;
            let reserved = self.bad("a reserved marker");
            let marker = self.take(1)?[0];
            let payload = match marker {
                0x00..=0x7F | 0xE0..=0xFF | NIL | 0xC2 | 0xC3 => 0,
                0x80..=0x8F => {
                    left += 2 * u64::from(marker & 0x0F);
                    0
                }
                0x90..=0x9F => {
                    left += u64::from(marker & 0x0F);
                    0
                }
                0xA0..=0xBF => u64::from(marker & 0x1F),
                0xC4 | 0xD9 => self.big_endian(1)?,
                0xC5 | 0xDA => self.big_endian(2)?,
                0xC6 | 0xDB => self.big_endian(4)?,
                0xC7 => self.big_endian(1)? + 1,
                0xC8 => self.big_endian(2)? + 1,
                0xC9 => self.big_endian(4)? + 1,
                0xCC | 0xD0 => 1,
                0xCD | 0xD1 => 2,
                0xCA | 0xCE | 0xD2 => 4,
                0xCB | 0xCF | 0xD3 => 8,
                0xD4..=0xD8 => (1 << (marker - 0xD4)) + 1,
                0xDC => {
                    left += self.big_endian(2)?;
                    0
                }
                0xDD => {
                    left += self.big_endian(4)?;
                    0
                }
                0xDE => {
                    left += 2 * self.big_endian(2)?;
                    0
                }
                0xDF => {
                    left += 2 * self.big_endian(4)?;
                    0
                }
                0xC1 => return Err(reserved),
            };
            self.take(payload as usize)?;
        }
        Ok(())
    }
}
