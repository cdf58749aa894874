//! A cursor over msgpack that comes from a wire: every length is checked against the bytes that are there, and
//! skipping needs no recursion.

use rmp::Marker;
use rmp::decode::RmpRead;

use crate::wire::WireError;

type Result<T> = std::result::Result<T, WireError>;

/// A cursor over msgpack. The readers return `None`, without moving, when a value is of another kind, except
/// that nil is taken.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl Reader<'_> {
    pub(crate) fn peek(&self) -> Result<Marker> {
        self.0.first().map(|&byte| Marker::from_u8(byte)).ok_or(WireError("the bytes end too early"))
    }

    pub(crate) fn array(&mut self) -> Result<Option<u32>> {
        match self.peek()? {
            Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => {
                let len = rmp::decode::read_array_len(&mut self.0).map_err(|_| WireError("a bad array"))?;
                // Every element takes a byte at least: a length that lies is found here.
                if len as usize > self.0.len() {
                    Err(WireError("an array longer than its bytes"))
                } else {
                    Ok(Some(len))
                }
            }
            _ => Ok(None),
        }
    }

    pub(crate) fn peek_map(&self) -> Option<u32> {
        let mut copy = Reader(self.0);
        copy.map().ok().flatten()
    }

    pub(crate) fn map(&mut self) -> Result<Option<u32>> {
        match self.peek()? {
            Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => {
                let len = rmp::decode::read_map_len(&mut self.0).map_err(|_| WireError("a bad map"))?;
                if len as usize > self.0.len() {
                    Err(WireError("a map longer than its bytes"))
                } else {
                    Ok(Some(len))
                }
            }
            _ => Ok(None),
        }
    }

    pub(crate) fn number(&mut self) -> Result<f64> {
        let bad = |_| WireError("a bad number");
        match self.peek()? {
            Marker::F64 => rmp::decode::read_f64(&mut self.0).map_err(bad),
            Marker::F32 => rmp::decode::read_f32(&mut self.0).map(f64::from).map_err(bad),
            _ => Ok(self.integer()?.ok_or(WireError("a number is missing"))? as f64),
        }
    }

    /// Any integer; unsigned ones above the signed range keep their bits.
    pub(crate) fn integer(&mut self) -> Result<Option<i64>> {
        match self.peek()? {
            Marker::Null => {
                self.advance(1)?;
                Ok(None)
            }
            Marker::U64 => rmp::decode::read_u64(&mut self.0)
                .map(|value| Some(value as i64))
                .map_err(|_| WireError("a bad integer")),
            Marker::FixPos(_)
            | Marker::FixNeg(_)
            | Marker::U8
            | Marker::U16
            | Marker::U32
            | Marker::I8
            | Marker::I16
            | Marker::I32
            | Marker::I64 => {
                rmp::decode::read_int(&mut self.0).map(Some).map_err(|_| WireError("a bad integer"))
            }
            _ => Ok(None),
        }
    }

    pub(crate) fn hash(&mut self) -> Result<Option<u64>> {
        match self.peek()? {
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => {
                let len =
                    rmp::decode::read_bin_len(&mut self.0).map_err(|_| WireError("bad bytes"))? as usize;
                let (bytes, rest) = self.0.split_at_checked(len).ok_or(WireError("bytes end too early"))?;
                self.0 = rest;
                let low = &bytes[len.saturating_sub(8)..];
                Ok(Some(low.iter().fold(0, |hash, &byte| hash << 8 | u64::from(byte))))
            }
            _ => Ok(self.integer()?.map(|value| value as u64)),
        }
    }

    pub(crate) fn text(&mut self) -> Result<Option<String>> {
        match self.peek()? {
            Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => {
                let len =
                    rmp::decode::read_str_len(&mut self.0).map_err(|_| WireError("a bad string"))? as usize;
                let (bytes, rest) =
                    self.0.split_at_checked(len).ok_or(WireError("a string ends too early"))?;
                self.0 = rest;
                Ok(Some(String::from_utf8_lossy(bytes).into_owned()))
            }
            Marker::Null => {
                self.advance(1)?;
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    pub(crate) fn advance(&mut self, bytes: usize) -> Result<()> {
        self.0 = self.0.get(bytes..).ok_or(WireError("the bytes end too early"))?;
        Ok(())
    }

    /// Skips one value of any kind, however deep, without recursion.
    pub(crate) fn skip(&mut self) -> Result<()> {
        let mut left = 1_u64;
        while left > 0 {
            left -= 1;
            let marker =
                rmp::decode::read_marker(&mut self.0).map_err(|_| WireError("the bytes end too early"))?;
            let mut len = |width: usize| -> Result<u64> {
                let mut value = 0;
                for _ in 0..width {
                    value = value << 8
                        | u64::from(self.0.read_u8().map_err(|_| WireError("a length is cut off"))?);
                }
                Ok(value)
            };
            let payload = match marker {
                Marker::Null | Marker::True | Marker::False | Marker::FixPos(_) | Marker::FixNeg(_) => 0,
                Marker::U8 | Marker::I8 => 1,
                Marker::U16 | Marker::I16 => 2,
                Marker::U32 | Marker::I32 | Marker::F32 => 4,
                Marker::U64 | Marker::I64 | Marker::F64 => 8,
                Marker::FixStr(n) => u64::from(n),
                Marker::Str8 | Marker::Bin8 => len(1)?,
                Marker::Str16 | Marker::Bin16 => len(2)?,
                Marker::Str32 | Marker::Bin32 => len(4)?,
                Marker::FixExt1 => 2,
                Marker::FixExt2 => 3,
                Marker::FixExt4 => 5,
                Marker::FixExt8 => 9,
                Marker::FixExt16 => 17,
                Marker::Ext8 => len(1)? + 1,
                Marker::Ext16 => len(2)? + 1,
                Marker::Ext32 => len(4)? + 1,
                Marker::FixArray(n) => {
                    left += u64::from(n);
                    0
                }
                Marker::Array16 => {
                    left += len(2)?;
                    0
                }
                Marker::Array32 => {
                    left += len(4)?;
                    0
                }
                Marker::FixMap(n) => {
                    left += 2 * u64::from(n);
                    0
                }
                Marker::Map16 => {
                    left += 2 * len(2)?;
                    0
                }
                Marker::Map32 => {
                    left += 2 * len(4)?;
                    0
                }
                Marker::Reserved => return Err(WireError("a reserved marker")),
            };
            self.advance(usize::try_from(payload).map_err(|_| WireError("an impossible length"))?)?;
        }
        Ok(())
    }
}
