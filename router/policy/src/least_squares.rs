//! Least squares with forgetting, for a handful of coefficients of which none is below zero.
//!
//! The sums of the normal equations fade with each observation and are solved when asked for, with some weight on a first
//! guess. The recursive form (Haykin, Adaptive Filter Theory, ch. 10) needs no solving, but its matrix loses its shape
//! after some ten thousand observations, and with it every prediction: the simulated hour, repeated ten times, ended with
//! waits of minutes.

/// The normal equations of `N` coefficients.
#[derive(Debug, Clone)]
pub struct LeastSquares<const N: usize> {
    guess: [f64; N],
    guess_weight: f64,
    forgetting: f64,
    /// Faded sums of feature × feature and of feature × target.
    products: [[f64; N]; N],
    targets: [f64; N],
}

impl<const N: usize> LeastSquares<N> {
    /// No observation yet. The guess counts as much as observations whose squared features add up to `guess_weight`; an
    /// observation counts `forgetting` times as much with each one after it.
    #[must_use]
    pub fn new(guess: [f64; N], guess_weight: f64, forgetting: f64) -> Self {
        Self { guess, guess_weight, forgetting, products: [[0.0; N]; N], targets: [0.0; N] }
    }

    /// The sum of coefficient × feature was `target`. All numbers must be finite.
    pub fn observe(&mut self, features: [f64; N], target: f64) {
        for (at, row) in self.products.iter_mut().enumerate() {
            for (cell, feature) in row.iter_mut().zip(features) {
                *cell = *cell * self.forgetting + features[at] * feature;
            }
            self.targets[at] = self.targets[at] * self.forgetting + features[at] * target;
        }
    }

    /// The coefficients; what comes out below zero is set to zero and the others are solved for again. `None` when numbers
    /// are too large to go on with.
    #[must_use]
    pub fn solve(&self) -> Option<[f64; N]> {
        let mut used = [true; N];
        loop {
            let weights = self.solved_for(&used)?;
            let least = (0..N).filter(|&at| used[at]).min_by(|&a, &b| weights[a].total_cmp(&weights[b]));
            match least.filter(|&at| weights[at] < 0.0) {
                Some(at) => used[at] = false,
                None => return Some(weights),
            }
        }
    }

    /// The coefficients of the used features, zero for the others; by Cholesky's method.
    fn solved_for(&self, used: &[bool; N]) -> Option<[f64; N]> {
        let mut lower = [[0.0; N]; N];
        let mut solution = [0.0; N];
        for row in 0..N {
            for column in 0..=row {
                let is_used = used[row] && used[column];
                let mut sum = if is_used { self.products[row][column] } else { 0.0 };
                if row == column {
                    sum += if is_used { self.guess_weight } else { 1.0 };
                }
                sum -= (0..column).map(|k| lower[row][k] * lower[column][k]).sum::<f64>();
                lower[row][column] = if row == column { sum.sqrt() } else { sum / lower[column][column] };
            }
            let target =
                if used[row] { self.targets[row] + self.guess_weight * self.guess[row] } else { 0.0 };
            let sum: f64 = (0..row).map(|k| lower[row][k] * solution[k]).sum();
            solution[row] = (target - sum) / lower[row][row];
        }
        for row in (0..N).rev() {
            let sum: f64 = (row + 1..N).map(|k| lower[k][row] * solution[k]).sum();
            solution[row] = (solution[row] - sum) / lower[row][row];
        }
        solution.iter().all(|weight| weight.is_finite()).then_some(solution)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_data_says_nothing_of_stays_with_the_guess() {
        let mut regression = LeastSquares::new([1.0, 2.0], 0.01, 0.99);
        let [first, second] = regression.solve().expect("a solution");
        assert!((first - 1.0).abs() < 1e-9 && (second - 2.0).abs() < 1e-9, "{first} {second}");
        (0..100)
            .for_each(|number| regression.observe([f64::from(number % 7), 0.0], 5.0 * f64::from(number % 7)));
        let [learned, guessed] = regression.solve().expect("a solution");
        assert!((learned - 5.0).abs() < 0.01 && (guessed - 2.0).abs() < 1e-9, "{learned} {guessed}");
    }

    #[test]
    fn no_coefficient_is_below_zero() {
        let mut regression = LeastSquares::new([1.0, 1.0], 0.01, 0.99);
        for number in 0..200 {
            let (a, b) = (f64::from(number % 5), f64::from(number % 3));
            regression.observe([a, b], 4.0 * a - 2.0 * b);
        }
        let [first, second] = regression.solve().expect("a solution");
        assert!(first > 0.0 && second.abs() < f64::EPSILON, "{first} {second}");
    }
}
