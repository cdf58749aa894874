//! Copies that wait for a flush, merged with their neighbours: the list of driver calls to make.
//!
//! A copy that begins where the last one ended, on both sides and in the same regions, extends that one.
//! Adjacent rows become one piece. Memory is reserved once; adding a copy takes constant time.

use crate::copy::{Resolved, Rows};

/// One call of the driver, or one entry of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CopySpan {
    pub(crate) copy: Resolved,
    /// Places of the first and last token that the run belongs to: neighbours of different tokens may be
    /// merged.
    pub(crate) tokens: (u64, u64),
}

/// The runs, in the order of submission.
#[derive(Debug)]
pub(crate) struct Plan {
    runs: Vec<CopySpan>,
    capacity: usize,
}

impl Plan {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { runs: Vec::with_capacity(capacity), capacity }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of further runs that fit.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.capacity - self.runs.len()
    }

    pub(crate) fn runs(&self) -> &[CopySpan] {
        &self.runs
    }

    pub(crate) fn clear(&mut self) {
        self.runs.clear();
    }

    /// Adds a copy of the token at place `token`. The caller has checked that there is room for one run, or
    /// for one per row when `by_row` is set.
    pub(crate) fn add(&mut self, copy: Resolved, by_row: bool, token: u64) {
        let Resolved { from, to, rows, regions } = simplified(copy);
        if rows.bytes == 0 {
            return;
        }
        if !by_row || rows.count == 1 {
            return self.add_run(Resolved { from, to, rows, regions }, token);
        }
        for row in 0..rows.count as u64 {
            let (from, to) = (from + row * rows.from_stride as u64, to + row * rows.to_stride as u64);
            self.add_run(Resolved { from, to, rows: Rows::contiguous(rows.bytes), regions }, token);
        }
    }

    fn add_run(&mut self, copy: Resolved, token: u64) {
        if let Some(last) = self.runs.last_mut()
            && is_neighbour(&last.copy, &copy)
        {
            last.copy.rows = Rows::contiguous(last.copy.rows.bytes + copy.rows.bytes);
            last.tokens.1 = token;
            return;
        }
        assert!(self.runs.len() < self.capacity, "the caller checks the room");
        self.runs.push(CopySpan { copy, tokens: (token, token) });
    }
}

/// Merges rows that are adjacent on both sides into one piece.
fn simplified(copy: Resolved) -> Resolved {
    let Rows { bytes, count, from_stride, to_stride } = copy.rows;
    if count > 1 && from_stride == bytes && to_stride == bytes {
        return Resolved { rows: Rows::contiguous(bytes * count), ..copy };
    }
    copy
}

fn is_neighbour(last: &Resolved, next: &Resolved) -> bool {
    last.rows.count == 1
        && next.rows.count == 1
        && last.regions == next.regions
        && last.from + last.rows.bytes as u64 == next.from
        && last.to + last.rows.bytes as u64 == next.to
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(from: u64, to: u64, bytes: usize) -> Resolved {
        Resolved { from, to, rows: Rows::contiguous(bytes), regions: (0, 1) }
    }

    fn planned(copies: &[Resolved]) -> Vec<(u64, u64, usize, (u64, u64))> {
        let mut plan = Plan::new(8);
        for (token, copy) in copies.iter().enumerate() {
            plan.add(*copy, false, token as u64);
        }
        let shown = |run: &CopySpan| (run.copy.from, run.copy.to, run.copy.rows.bytes, run.tokens);
        plan.runs().iter().map(shown).collect()
    }

    #[test]
    fn neighbours_on_both_sides_and_in_the_same_regions_become_one() {
        let elsewhere = Resolved { regions: (0, 2), ..piece(30, 130, 10) };
        assert_eq!(
            planned(&[
                piece(0, 100, 10),
                piece(10, 110, 20),
                elsewhere,
                piece(50, 140, 5),
                piece(55, 146, 5),
                piece(0, 0, 0),
                piece(60, 151, 1)
            ]),
            [(0, 100, 30, (0, 1)), (30, 130, 10, (2, 2)), (50, 140, 5, (3, 3)), (55, 146, 6, (4, 6))]
        );
    }

    #[test]
    fn rows_that_touch_are_one_piece_and_others_are_not_merged() {
        let rows = |from_stride, to_stride| Rows { bytes: 8, count: 3, from_stride, to_stride };
        let touching = Resolved { rows: rows(8, 8), ..piece(10, 20, 0) };
        assert_eq!(planned(&[touching, piece(34, 44, 6)]), [(10, 20, 30, (0, 1))]);
        let apart = Resolved { rows: rows(8, 16), ..piece(0, 0, 0) };
        assert_eq!(planned(&[apart, piece(24, 48, 1)]).len(), 2);
        let mut plan = Plan::new(3);
        plan.add(apart, true, 7);
        assert_eq!(plan.runs()[2].copy, Resolved { rows: Rows::contiguous(8), ..piece(16, 32, 0) });
        assert_eq!(plan.room(), 0);
    }
}
