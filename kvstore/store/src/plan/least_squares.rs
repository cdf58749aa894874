//! Least squares with forgetting, over at most a few parameters that cannot be negative.
//!
//! The sums of the normal equations decay by a factor for each new row. The solution is the exact
//! non-negative one (every subset of positive parameters is tried: 2^N small systems, N ≤ 3), pulled towards
//! the previous solution by [`PROXIMITY`] of each parameter's own weight. That pull decides the directions in
//! which the rows say nothing (all transfers of equal size cannot tell latency from bandwidth): there the
//! parameters stay where they were, and the system is never singular. Because the pull is relative to the
//! diagonal, no unit needs tuning. Recursive least squares on the inverse was not taken: with forgetting and
//! unexciting input its covariance grows without bound ("wind-up"), and it cannot keep signs.

/// Weight of the previous solution, as a part of the diagonal.
const PROXIMITY: f64 = 1e-3;

/// The sums and their solution.
#[derive(Debug, Clone)]
pub(crate) struct LeastSquares<const N: usize> {
    normal: [[f64; N]; N],
    moment: [f64; N],
    parameters: [f64; N],
}

impl<const N: usize> LeastSquares<N> {
    /// Starts from a guess that has no weight.
    pub(crate) fn new(parameters: [f64; N]) -> Self {
        Self { normal: [[0.0; N]; N], moment: [0.0; N], parameters }
    }

    /// The solution.
    pub(crate) fn parameters(&self) -> &[f64; N] {
        &self.parameters
    }

    /// Returns the target that the solution predicts for a row with these features.
    pub(crate) fn predict(&self, features: &[f64; N]) -> f64 {
        features.iter().zip(&self.parameters).map(|(feature, parameter)| feature * parameter).sum()
    }

    /// Forgets every row and multiplies the solution, as far as a row with these features says anything of it.
    pub(crate) fn restart(&mut self, factor: f64, features: &[f64; N]) {
        let scaled = |at: usize| self.parameters[at] * if features[at] == 0.0 { 1.0 } else { factor };
        *self = Self::new(std::array::from_fn(scaled));
    }

    /// Adds a row of a weight after the older rows have been multiplied by `keep`.
    pub(crate) fn observe(&mut self, features: &[f64; N], target: f64, weight: f64, keep: f64) {
        for row in 0..N {
            for column in 0..N {
                self.normal[row][column] =
                    self.normal[row][column] * keep + weight * features[row] * features[column];
            }
            self.moment[row] = self.moment[row] * keep + weight * features[row] * target;
        }
        self.solve();
    }

    /// In units in which the diagonal is one, so that bytes and seconds do not spoil the arithmetic.
    fn solve(&mut self) {
        let unit: [f64; N] = std::array::from_fn(|at| self.normal[at][at].sqrt());
        let mut normal = [[0.0; N]; N];
        let mut moment = [0.0; N];
        for row in 0..N {
            if unit[row] > 0.0 {
                for column in (0..N).filter(|column| unit[*column] > 0.0) {
                    normal[row][column] = self.normal[row][column] / (unit[row] * unit[column]);
                }
                moment[row] = self.moment[row] / unit[row] + PROXIMITY * self.parameters[row] * unit[row];
            }
            normal[row][row] += PROXIMITY;
        }
        let mut best = ([0.0; N], 0.0);
        for subset in 1..1_usize << N {
            let candidate = solve_subset(&normal, &moment, subset);
            if candidate.iter().any(|value| *value < 0.0 || !value.is_finite()) {
                continue;
            }
            let loss = loss(&normal, &moment, &candidate);
            if loss < best.1 {
                best = (candidate, loss);
            }
        }
        for at in (0..N).filter(|at| unit[*at] > 0.0) {
            self.parameters[at] = best.0[at] / unit[at];
        }
    }
}

/// The quadratic form that the solution minimises.
fn loss<const N: usize>(normal: &[[f64; N]; N], moment: &[f64; N], point: &[f64; N]) -> f64 {
    let mut loss = 0.0;
    for row in 0..N {
        let product: f64 = (0..N).map(|column| normal[row][column] * point[column]).sum();
        loss += point[row] * (product - 2.0 * moment[row]);
    }
    loss
}

/// Gauss elimination among the parameters of a subset; the others are zero. The matrix is positive definite,
/// so no pivoting is needed.
fn solve_subset<const N: usize>(normal: &[[f64; N]; N], moment: &[f64; N], subset: usize) -> [f64; N] {
    let inside = |at: &usize| subset >> *at & 1 == 1;
    let (mut matrix, mut right) = (*normal, *moment);
    for pivot in (0..N).filter(inside) {
        for row in (pivot + 1..N).filter(inside) {
            let factor = matrix[row][pivot] / matrix[pivot][pivot];
            for column in (pivot..N).filter(inside) {
                matrix[row][column] -= factor * matrix[pivot][column];
            }
            right[row] -= factor * right[pivot];
        }
    }
    let mut solution = [0.0; N];
    for row in (0..N).rev().filter(inside) {
        let known: f64 =
            (row + 1..N).filter(inside).map(|column| matrix[row][column] * solution[column]).sum();
        solution[row] = (right[row] - known) / matrix[row][row];
    }
    solution
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_rows_are_recovered() {
        let mut fit = LeastSquares::new([1.0, 1.0, 1.0]);
        for step in 1..200 {
            let tokens = f64::from(step * 37 % 900 + 1);
            let context = f64::from(step * 101 % 3000);
            let row = [1.0, tokens, tokens * (context + tokens / 2.0)];
            let target = 5e-3 * row[0] + 4e-5 * row[1] + 1e-9 * row[2];
            fit.observe(&row, target, 1.0 / (target * target), 0.99);
        }
        for (found, wanted) in fit.parameters().iter().zip([5e-3, 4e-5, 1e-9]) {
            assert!((found / wanted - 1.0).abs() < 0.02, "{found} for {wanted}");
        }
    }

    #[test]
    fn a_negative_optimum_is_clipped_to_the_best_non_negative_one() {
        let mut fit = LeastSquares::new([1.0, 1.0]);
        // The line through these points has the intercept −1.
        for _ in 0..50 {
            for at in 1..10 {
                let at = f64::from(at);
                fit.observe(&[1.0, at], 2.0 * at - 1.0, 1.0, 1.0);
            }
        }
        let [intercept, slope] = *fit.parameters();
        let through_origin: f64 =
            (1..10).map(|at| f64::from(at) * (2.0 * f64::from(at) - 1.0)).sum::<f64>() / 285.0;
        assert!(intercept.abs() < 1e-9, "{intercept}");
        assert!((slope / through_origin - 1.0).abs() < 0.01, "{slope} for {through_origin}");
    }

    #[test]
    fn equal_rows_move_the_prediction_and_stay_finite() {
        let mut fit = LeastSquares::new([1e-3, 1e-9]);
        for _ in 0..10_000 {
            fit.observe(&[1.0, 1e6], 0.5, 4.0, 0.9);
        }
        assert!((fit.predict(&[1.0, 1e6]) - 0.5).abs() < 1e-3);
        assert!(fit.parameters().iter().all(|value| value.is_finite() && *value >= 0.0));
    }
}
