//! Step times of an engine, from measurements of that engine alone.
//!
//! ```text
//! time to the first token = first + (per_prompt_token + per_kv_token) · n + per_prompt_square · n²    n tokens of one prompt
//! time between tokens     = base + per_request · r + per_kv_token · k                                 r requests, k tokens of KV
//! ```
//!
//! Both are fitted with relative errors and non-negative coefficients. `first` is the time of a request in
//! addition to its step (network, tokenisation), so it is not a coefficient of the engine.

use crate::engine::StepTime;

/// A prompt that ran alone on the engine, with none of its tokens cached.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PromptSample {
    /// Tokens of the prompt.
    pub tokens: f64,
    /// Seconds to the first token.
    pub seconds: f64,
}

/// Requests that decoded concurrently.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeSample {
    /// Number of requests.
    pub requests: f64,
    /// Tokens of KV that the requests held together.
    pub kv_tokens: f64,
    /// Inter-token latency, in seconds.
    pub seconds: f64,
}

/// Fitted step times, with the errors of the fit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredEngine {
    /// The step times.
    pub step: StepTime,
    /// Seconds of a request in addition to those of its prompt.
    pub first: f64,
    /// Largest relative errors of the fit: times to first token, and inter-token latencies.
    pub errors: [f64; 2],
}

/// Coefficients of a fit.
const TERMS: usize = 3;
/// Fewest samples of each kind: one more than there are coefficients.
pub const SAMPLES_MIN: usize = TERMS + 1;

impl MeasuredEngine {
    /// Fits the measurements; an error names the missing samples.
    pub fn fit(prompts: &[PromptSample], decodes: &[DecodeSample]) -> Result<Self, String> {
        let prompt_rows: Vec<Row> = prompts
            .iter()
            .map(|sample| Row::new([1.0, sample.tokens, sample.tokens.powi(2)], sample.seconds))
            .collect();
        let decode_rows: Vec<Row> = decodes
            .iter()
            .map(|sample| Row::new([1.0, sample.requests, sample.kv_tokens], sample.seconds))
            .collect();
        let solved = |rows: &[Row], what: &str| {
            let usable = rows.iter().filter(|row| row.is_usable()).count();
            if usable < SAMPLES_MIN {
                return Err(format!("{usable} measurements of {what}, and {SAMPLES_MIN} are needed"));
            }
            solve(rows).ok_or_else(|| format!("the measurements of {what} do not differ enough"))
        };
        let [base, per_request, per_kv_token] = solved(&decode_rows, "times between tokens")?;
        let [first, per_token, per_prompt_square] = solved(&prompt_rows, "times to the first token")?;
        let step = StepTime {
            base,
            per_request,
            per_kv_token,
            // The tokens of a prompt are also KV that its request holds.
            per_prompt_token: (per_token - per_kv_token).max(0.0),
            per_prompt_square,
        };
        let errors = [
            largest_error(&prompt_rows, [first, per_token, per_prompt_square]),
            largest_error(&decode_rows, [base, per_request, per_kv_token]),
        ];
        Ok(Self { step, first, errors })
    }
}

/// A measurement: the factors of the coefficients, and the measured seconds.
#[derive(Clone, Copy)]
struct Row {
    factors: [f64; TERMS],
    seconds: f64,
}

impl Row {
    fn new(factors: [f64; TERMS], seconds: f64) -> Self {
        Self { factors, seconds }
    }

    fn is_usable(&self) -> bool {
        self.seconds.is_finite() && self.seconds > 0.0 && self.factors.iter().all(|factor| factor.is_finite())
    }

    fn of(&self, coefficients: [f64; TERMS]) -> f64 {
        self.factors.iter().zip(coefficients).map(|(factor, coefficient)| factor * coefficient).sum()
    }
}

fn largest_error(rows: &[Row], coefficients: [f64; TERMS]) -> f64 {
    let error = |row: &Row| (row.of(coefficients) / row.seconds - 1.0).abs();
    rows.iter().filter(|row| row.is_usable()).map(error).fold(0.0, f64::max)
}

/// Returns the non-negative coefficients with the least sum of squared relative errors. With three
/// coefficients, each set of coefficients that may be above zero is tried; the best non-negative solution is
/// the optimum, because the problem is convex.
fn solve(rows: &[Row]) -> Option<[f64; TERMS]> {
    let mut best: Option<([f64; TERMS], f64)> = None;
    for set in 1..1_u32 << TERMS {
        let Some(solution) = solve_set(rows, set) else { continue };
        if solution.iter().any(|coefficient| *coefficient < 0.0) {
            continue;
        }
        let error: f64 = rows
            .iter()
            .filter(|row| row.is_usable())
            .map(|row| (row.of(solution) / row.seconds - 1.0).powi(2))
            .sum();
        if best.is_none_or(|(_, least)| error < least) {
            best = Some((solution, error));
        }
    }
    best.map(|(solution, _)| solution)
}

/// Solves least squares with only the coefficients of this set, by the normal equations of columns scaled to
/// one.
fn solve_set(rows: &[Row], set: u32) -> Option<[f64; TERMS]> {
    let columns: Vec<usize> = (0..TERMS).filter(|column| set >> column & 1 == 1).collect();
    let usable: Vec<&Row> = rows.iter().filter(|row| row.is_usable()).collect();
    let scale: Vec<f64> = columns
        .iter()
        .map(|&column| {
            usable.iter().map(|row| (row.factors[column] / row.seconds).powi(2)).sum::<f64>().sqrt()
        })
        .collect();
    if scale.iter().any(|scale| *scale <= 0.0) {
        return None;
    }
    let size = columns.len();
    // Augmented matrix: the last column is the right-hand side.
    let mut matrix = vec![vec![0.0; size + 1]; size];
    for row in &usable {
        let scaled: Vec<f64> = columns
            .iter()
            .zip(&scale)
            .map(|(&column, scale)| row.factors[column] / row.seconds / scale)
            .collect();
        for (line, factor) in matrix.iter_mut().zip(&scaled) {
            for (cell, other) in line.iter_mut().zip(scaled.iter().chain([&1.0])) {
                *cell += factor * other;
            }
        }
    }
    for pivot in 0..size {
        let largest = (pivot..size)
            .max_by(|&one, &other| matrix[one][pivot].abs().total_cmp(&matrix[other][pivot].abs()))?;
        matrix.swap(pivot, largest);
        if matrix[pivot][pivot].abs() < 1e-9 {
            return None;
        }
        let pivot_line = matrix[pivot].clone();
        for (_, line) in matrix.iter_mut().enumerate().filter(|(at, _)| *at != pivot) {
            let factor = line[pivot] / pivot_line[pivot];
            line.iter_mut().zip(&pivot_line).for_each(|(cell, other)| *cell -= factor * other);
        }
    }
    let mut solution = [0.0; TERMS];
    for (at, &column) in columns.iter().enumerate() {
        solution[column] = matrix[at][size] / matrix[at][at] / scale[at];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(
        step: &StepTime,
        first: f64,
        mut noise: impl FnMut() -> f64,
    ) -> (Vec<PromptSample>, Vec<DecodeSample>) {
        let prompts = [256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0_f64];
        let prompts = prompts.map(|tokens| {
            let seconds = first + step.prefill(0.0, tokens) + step.per_kv_token * tokens;
            PromptSample { tokens, seconds: seconds * noise() }
        });
        let loads = [(1.0, 200.0), (8.0, 1600.0), (32.0, 6400.0), (8.0, 33_000.0), (32.0, 130_000.0)];
        let decodes = loads.map(|(requests, kv_tokens)| DecodeSample {
            requests,
            kv_tokens,
            seconds: step.decode(requests, kv_tokens) * noise(),
        });
        (prompts.to_vec(), decodes.to_vec())
    }

    #[test]
    fn exact_measurements_give_the_coefficients_back() {
        let step = crate::Engine::default().step;
        let (prompts, decodes) = samples(&step, 0.02, || 1.0);
        let measured = MeasuredEngine::fit(&prompts, &decodes).expect("a fit");
        for (found, truth) in [
            (measured.step.base, step.base),
            (measured.step.per_request, step.per_request),
            (measured.step.per_kv_token, step.per_kv_token),
            (measured.step.per_prompt_token, step.per_prompt_token),
            (measured.step.per_prompt_square, step.per_prompt_square),
            (measured.first, 0.02),
        ] {
            assert!((found / truth - 1.0).abs() < 1e-3, "{found} {truth}");
        }
        assert!(measured.errors[0] < 1e-6 && measured.errors[1] < 1e-6);
    }

    #[test]
    fn noise_makes_no_coefficient_negative_and_is_told() {
        // Without a square term and without a cost per request: noise would make both negative.
        let step = StepTime {
            base: 0.01,
            per_request: 0.0,
            per_kv_token: 1e-7,
            per_prompt_token: 1e-4,
            per_prompt_square: 0.0,
        };
        let mut at = 0;
        let noise = || {
            at += 1;
            1.0 + [0.03, -0.02, 0.01, -0.03, 0.02][at % 5]
        };
        let (prompts, decodes) = samples(&step, 0.01, noise);
        let measured = MeasuredEngine::fit(&prompts, &decodes).expect("a fit");
        let found = measured.step;
        assert!(
            [
                found.base,
                found.per_request,
                found.per_kv_token,
                found.per_prompt_token,
                found.per_prompt_square
            ]
            .iter()
            .all(|coefficient| *coefficient >= 0.0)
        );
        assert!((0.005..0.1).contains(&measured.errors[0]), "{:?}", measured.errors);
        assert!((measured.step.decode(32.0, 130_000.0) / step.decode(32.0, 130_000.0) - 1.0).abs() < 0.05);
    }

    #[test]
    fn too_few_or_equal_measurements_are_refused() {
        let (prompts, decodes) = samples(&crate::Engine::default().step, 0.0, || 1.0);
        assert!(MeasuredEngine::fit(&prompts[..3], &decodes).expect_err("three").contains("3 measurements"));
        let broken = [DecodeSample { requests: 1.0, kv_tokens: f64::NAN, seconds: 1.0 }; 9];
        assert!(MeasuredEngine::fit(&prompts, &broken).expect_err("none").contains("0 measurements"));
    }
}
