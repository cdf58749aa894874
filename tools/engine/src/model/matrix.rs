//! Matrix products through `matrixmultiply`, split over threads by columns.
//!
//! The crate sums each output element over k in one fixed order (blocks of 256, in order inside a block), whatever the
//! number of rows and wherever the columns are cut; the test `rows_do_not_depend_on_their_company` checks that for the
//! shapes that matter. Batching, chunking and threading therefore change no bit.
//!
//! The crate was chosen over faster kernels for that property and for being maintained; its packing makes a product with one
//! row about six times slower than a dot loop, which is acceptable in a reference engine.

use rayon::prelude::*;

/// Number of multiplications below which a product runs on the calling thread.
const PARALLEL_FROM: usize = 1 << 21;
/// Least number of columns per thread.
const PANEL_COLUMNS_MIN: usize = 32;

/// A row-major view: element (r, c) is `data[r * row_stride + c * column_stride]`.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) data: &'a [f32],
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<'a> View<'a> {
    /// A dense row-major matrix.
    pub(super) fn dense(data: &'a [f32], rows: usize, columns: usize) -> Self {
        Self { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    fn is_inside(&self) -> bool {
        self.rows == 0
            || self.columns == 0
            || (self.rows - 1) * self.row_stride + (self.columns - 1) * self.column_stride < self.data.len()
    }
}

/// `out[r * out_stride + c] = Σ_k a[r, k] · b[k, c]`.
pub(super) fn multiply(a: View<'_>, b: View<'_>, out: &mut [f32], out_stride: usize) {
    assert_eq!(a.columns, b.rows, "inner dimensions");
    assert!(a.is_inside() && b.is_inside(), "a view reaches beyond its data");
    let (m, n) = (a.rows, b.columns);
    if m == 0 || n == 0 {
        return;
    }
    assert!(n <= out_stride && (m - 1) * out_stride + n <= out.len(), "the output is too small");
    let target = OutputStart(out.as_mut_ptr());
    if m * n * a.columns < PARALLEL_FROM {
        // SAFETY: views and output were checked above; `out` is borrowed exclusively.
        unsafe { columns(a, b, target, out_stride, 0, n) };
        return;
    }
    let panels = rayon::current_num_threads().min(n / PANEL_COLUMNS_MIN).max(1);
    (0..panels).into_par_iter().for_each(|panel| {
        let (from, to) = (n * panel / panels, n * (panel + 1) / panels);
        // SAFETY: as above, and panels write disjoint columns.
        unsafe { columns(a, b, target, out_stride, from, to) };
    });
}

/// Start of the output, handed to several threads that write disjoint columns of it.
#[derive(Clone, Copy)]
struct OutputStart(*mut f32);

// SAFETY: only `columns` writes through it, each call its own columns.
unsafe impl Send for OutputStart {}
// SAFETY: as above.
unsafe impl Sync for OutputStart {}

/// Computes columns `from..to`.
///
/// # Safety
/// 1. Every element of both views lies in its data.
/// 2. `out` is valid for writes of `a.rows` rows at `stride`, and no other code accesses columns `from..to` meanwhile.
unsafe fn columns(a: View<'_>, b: View<'_>, out: OutputStart, stride: usize, from: usize, to: usize) {
    let b_start = b.data[from * b.column_stride..].as_ptr();
    // SAFETY: contract 2; `from` is a column of the output's first row.
    let out_start = unsafe { out.0.add(from) };
    // SAFETY: contracts 1 and 2; with beta 0 the output is only written.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.columns,
            to - from,
            1.0,
            a.data.as_ptr(),
            a.row_stride as isize,
            a.column_stride as isize,
            b_start,
            b.row_stride as isize,
            b.column_stride as isize,
            0.0,
            out_start,
            stride as isize,
            1,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u32, len: usize) -> Vec<f32> {
        let mut random = fastrand::Rng::with_seed(seed.into());
        (0..len).map(|_| random.f32() - 0.5).collect()
    }

    #[test]
    fn rows_do_not_depend_on_their_company() {
        for (k, n) in [(32, 7), (128, 256), (256, 512), (300, 100), (600, 33)] {
            let (x, w) = (noise(1, 70 * k), noise(2, n * k));
            let weights = View::dense(&w, n, k).transposed();
            let mut whole = vec![0.0; 70 * n];
            multiply(View::dense(&x, 70, k), weights, &mut whole, n);
            for (from, rows) in [(0, 1), (69, 1), (3, 2), (10, 17), (6, 64)] {
                let mut part = vec![f32::NAN; rows * n];
                multiply(View::dense(&x[from * k..], rows, k), weights, &mut part, n);
                assert!(part == whole[from * n..(from + rows) * n], "k {k} n {n} rows {from}+{rows}");
            }
        }
    }

    #[test]
    fn agrees_with_a_plain_sum_in_double_precision() {
        let (m, k, n) = (5, 130, 90);
        let (x, w) = (noise(3, m * k), noise(4, n * k));
        let mut out = vec![f32::NAN; m * n];
        multiply(View::dense(&x, m, k), View::dense(&w, n, k).transposed(), &mut out, n);
        for row in 0..m {
            for column in 0..n {
                let exact: f64 =
                    (0..k).map(|i| f64::from(x[row * k + i]) * f64::from(w[column * k + i])).sum();
                assert!((f64::from(out[row * n + column]) - exact).abs() < 1e-5);
            }
        }
    }
}
