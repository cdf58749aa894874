//! Splits strided bytes into the fewest work requests.
//!
//! One RDMA operation has one contiguous range at the peer and a list of local ranges. So rows that are dense
//! at the peer travel many to a request, gathered (or scattered) by its entries; rows with gaps there need one
//! request each; rows without gaps on either side are one range. No range is longer than the ports allow.

use dataplane_fabric::Rows;

/// Bytes of one request, normalised: `None` rows are one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    rows: Rows,
    row_count: u32,
}

/// Progress of building the work requests of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Cursor {
    row: u32,
    within: u32,
}

/// Payload of one work request: `rows` local ranges of `bytes` each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PayloadRange {
    /// Offset of the piece at this side, from the first byte of the request.
    pub(crate) local: u32,
    /// Offset of the piece at the peer, from the first byte of the request.
    pub(crate) remote: u32,
    pub(crate) rows: u32,
    pub(crate) bytes: u32,
    pub(crate) local_stride: u32,
    /// Whether the piece ends the request.
    pub(crate) is_last: bool,
}

impl Geometry {
    /// `None` when the rows do not cut `len` bytes, or span more than 32 bits.
    pub(crate) fn new(len: u32, rows: Option<Rows>) -> Option<Self> {
        let one = Rows { bytes: len, local_stride: len, remote_stride: len };
        let Some(rows) = rows else { return Some(Self { rows: one, row_count: 1 }) };
        let is_dense = rows.local_stride == rows.bytes && rows.remote_stride == rows.bytes;
        if !rows.is_valid(len) {
            return None;
        }
        rows.span(len, rows.local_stride)?;
        rows.span(len, rows.remote_stride)?;
        if is_dense || len <= rows.bytes {
            return Some(Self { rows: one, row_count: 1 });
        }
        Some(Self { rows, row_count: rows.count(len) })
    }

    fn span(&self, stride: u32) -> u32 {
        (self.row_count - 1) * stride + self.rows.bytes
    }

    /// Returns the bytes from the first to the last byte touched at this side.
    pub(crate) fn local_span(&self) -> u32 {
        self.span(self.rows.local_stride)
    }

    /// Returns the bytes from the first to the last byte touched at the peer.
    pub(crate) fn remote_span(&self) -> u32 {
        self.span(self.rows.remote_stride)
    }

    /// Returns the next piece, of at most `entries_max` ranges and `bytes_max` bytes.
    pub(crate) fn next(&self, cursor: &mut Cursor, entries_max: u32, bytes_max: u32) -> PayloadRange {
        let Rows { bytes: row_bytes, local_stride, remote_stride } = self.rows;
        let local = cursor.row * local_stride + cursor.within;
        let remote = cursor.row * remote_stride + cursor.within;
        let (rows, bytes) = if cursor.within > 0 || row_bytes > bytes_max {
            (1, (row_bytes - cursor.within).min(bytes_max))
        } else if remote_stride == row_bytes {
            let fit = bytes_max.checked_div(row_bytes).unwrap_or(1);
            ((self.row_count - cursor.row).min(entries_max).min(fit), row_bytes)
        } else {
            (1, row_bytes)
        };
        cursor.within += bytes;
        if cursor.within == row_bytes {
            *cursor = Cursor { row: cursor.row + rows, within: 0 };
        }
        PayloadRange { local, remote, rows, bytes, local_stride, is_last: cursor.row == self.row_count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(len: u32, rows: Option<Rows>, entries_max: u32, bytes_max: u32) -> Vec<PayloadRange> {
        let geometry = Geometry::new(len, rows).expect("valid");
        let mut cursor = Cursor::default();
        let mut pieces = Vec::new();
        loop {
            pieces.push(geometry.next(&mut cursor, entries_max, bytes_max));
            if pieces.last().is_some_and(|piece| piece.is_last) {
                return pieces;
            }
        }
    }

    /// Compares every shape with a loop over single bytes.
    #[test]
    fn pieces_cover_each_byte_once_and_in_order() {
        let rows = |bytes, local_stride, remote_stride| Some(Rows { bytes, local_stride, remote_stride });
        let shapes = [
            (0, None),
            (1, None),
            (1000, None),
            (64, rows(64, 64, 64)),
            (320, rows(32, 32, 32)),
            (320, rows(32, 50, 32)),
            (320, rows(32, 32, 50)),
            (320, rows(32, 40, 50)),
            (90, rows(90, 500, 500)),
            (7, rows(1, 3, 1)),
            (7, rows(1, 1, 2)),
        ];
        for (len, shape) in shapes {
            for entries_max in [1, 2, 7, 16] {
                for bytes_max in [1, 5, 31, 32, 33, 64, 100_000] {
                    let mut found = Vec::new();
                    let pieces = pieces(len, shape, entries_max, bytes_max);
                    for piece in &pieces {
                        assert!(piece.rows >= 1 && piece.rows <= entries_max);
                        assert!(piece.rows * piece.bytes <= bytes_max, "{piece:?}");
                        for row in 0..piece.rows {
                            for byte in 0..piece.bytes {
                                let here = piece.local + row * piece.local_stride + byte;
                                found.push((here, piece.remote + row * piece.bytes + byte));
                            }
                        }
                    }
                    let whole =
                        shape.unwrap_or(Rows { bytes: len.max(1), local_stride: 0, remote_stride: 0 });
                    let expected: Vec<_> = (0..len)
                        .map(|at| (at / whole.bytes, at % whole.bytes))
                        .map(|(row, byte)| {
                            (row * whole.local_stride + byte, row * whole.remote_stride + byte)
                        })
                        .collect();
                    assert_eq!(found, expected, "{len} {shape:?} {entries_max} {bytes_max}");
                    assert_eq!(pieces.iter().filter(|piece| piece.is_last).count(), 1);
                }
            }
        }
    }

    #[test]
    fn dense_rows_take_the_fewest_requests() {
        let rows = |local_stride, remote_stride| Some(Rows { bytes: 32, local_stride, remote_stride });
        let count = |rows| pieces(32 * 100, rows, 16, 1 << 20).len();
        assert_eq!(count(rows(32, 32)), 1, "neighbours are merged");
        assert_eq!(count(rows(64, 32)), 7, "gathered sixteen at a time");
        assert_eq!(count(rows(64, 64)), 100, "one for each");
    }

    #[test]
    fn impossible_rows_are_refused() {
        let rows = |bytes, local_stride, remote_stride| Some(Rows { bytes, local_stride, remote_stride });
        for (len, rows) in [
            (10, rows(3, 3, 3)),
            (10, rows(0, 1, 1)),
            (10, rows(5, 4, 5)),
            (10, rows(5, 5, 4)),
            (10, rows(5, u32::MAX, 5)),
            (10, rows(5, 5, u32::MAX)),
        ] {
            assert_eq!(Geometry::new(len, rows), None, "{len} {rows:?}");
        }
    }
}
