//! Samples a token from logits.
//!
//! Randomness is a function of (seed, position in the sequence), not of a generator's state: a request that is resumed on
//! another worker from prompt and tokens so far draws the same numbers as in an uninterrupted run.

use std::collections::HashMap;

use router_openai::Sampling;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A chosen token with its log-probability and the most likely alternatives.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The chosen token.
    pub token: u32,
    /// Log-probability of the token before temperature and penalties.
    pub logprob: f32,
    /// The most likely tokens, best first, as many as requested.
    pub top: Vec<(u32, f32)>,
}

/// Tokens so far, for the penalties.
#[derive(Debug, Default)]
pub(crate) struct History<'a> {
    pub(crate) prompt: &'a [u32],
    pub(crate) output: &'a [u32],
}

/// Chooses a token. `banned` tokens cannot be chosen (the end of the sequence before `min_tokens`, say).
#[must_use]
pub fn choose(
    logits: &[f32],
    sampling: &Sampling,
    seed: u64,
    prompt: &[u32],
    output: &[u32],
    suppressed: &[u32],
    banned: &[u32],
) -> Choice {
    let mut logits = logits.to_vec();
    suppress(&mut logits, suppressed);
    let top = sampling.logprobs.map(|count| top_logprobs(&logits, count as usize)).unwrap_or_default();
    let normaliser = log_sum_exp(&logits);
    let raw = logits.clone();
    apply_penalties(&mut logits, sampling, &History { prompt, output });
    forbid(&mut logits, banned);
    let position = (prompt.len() + output.len()) as u64;
    let token =
        if sampling.temperature < 1e-5 { argmax(&logits) } else { draw(&logits, sampling, seed, position) };
    Choice { token, logprob: raw[token as usize] - normaliser, top }
}

/// Bans tokens, unless no other is left: a grammar may require one of them.
fn suppress(logits: &mut [f32], tokens: &[u32]) {
    let before: Vec<f32> =
        tokens.iter().map(|&token| logits.get(token as usize).copied().unwrap_or_default()).collect();
    forbid(logits, tokens);
    if logits.iter().any(|&logit| logit > f32::NEG_INFINITY) {
        return;
    }
    for (&token, before) in tokens.iter().zip(before) {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = before;
        }
    }
}

fn forbid(logits: &mut [f32], tokens: &[u32]) {
    for &token in tokens {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

fn apply_penalties(logits: &mut [f32], sampling: &Sampling, history: &History<'_>) {
    for &(token, bias) in &sampling.logit_bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
    let additive = sampling.frequency_penalty != 0.0 || sampling.presence_penalty != 0.0;
    let multiplicative = sampling.repetition_penalty != 1.0;
    if !additive && !multiplicative {
        return;
    }
    // Occurrences in the output; prompt tokens are listed with zero.
    let mut seen: HashMap<u32, u32> = history.prompt.iter().map(|&token| (token, 0)).collect();
    history.output.iter().for_each(|&token| *seen.entry(token).or_default() += 1);
    for (token, count) in seen {
        let Some(logit) = logits.get_mut(token as usize) else { continue };
        if multiplicative {
            *logit = if *logit > 0.0 {
                *logit / sampling.repetition_penalty
            } else {
                *logit * sampling.repetition_penalty
            };
        }
        if count > 0 {
            *logit -= sampling.frequency_penalty * count as f32 + sampling.presence_penalty;
        }
    }
}

fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

fn draw(logits: &[f32], sampling: &Sampling, seed: u64, position: u64) -> u32 {
    let mut order: Vec<u32> =
        (0..logits.len() as u32).filter(|&id| logits[id as usize] > f32::NEG_INFINITY).collect();
    // Ties are ordered by id, so that the order is total.
    order.sort_unstable_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k as usize);
    }
    let Some(&first) = order.first() else { return argmax(logits) };
    let best = logits[first as usize];
    let weight = |id: u32| f64::from((logits[id as usize] - best) / sampling.temperature).exp();
    let mut weights: Vec<f64> = order.iter().map(|&id| weight(id)).collect();
    let total: f64 = weights.iter().sum();
    let mut kept = weights.len();
    if sampling.top_p < 1.0 {
        let mut sum = 0.0;
        kept = weights
            .iter()
            .take_while(|&&weight| {
                let before = sum;
                sum += weight / total;
                before < f64::from(sampling.top_p)
            })
            .count();
    }
    if sampling.min_p > 0.0 {
        // The best token's weight is 1.
        kept = kept.min(weights.iter().take_while(|&&weight| weight >= f64::from(sampling.min_p)).count());
    }
    weights.truncate(kept.max(1));
    let mut left = uniform(seed, position) * weights.iter().sum::<f64>();
    for (&id, weight) in order.iter().zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return id;
        }
    }
    order[weights.len() - 1]
}

/// A pseudo-random number in [0, 1) that is a function of its arguments only.
fn uniform(seed: u64, position: u64) -> f64 {
    (xxh3_64_with_seed(&position.to_le_bytes(), seed) >> 11) as f64 / (1_u64 << 53) as f64
}

fn log_sum_exp(logits: &[f32]) -> f32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    largest + sum.ln() as f32
}

fn top_logprobs(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let normaliser = log_sum_exp(logits);
    // Masked tokens (minus infinity) have no log-probability and are left out.
    let mut order: Vec<u32> =
        (0..logits.len() as u32).filter(|&id| logits[id as usize] > f32::NEG_INFINITY).collect();
    let count = count.min(order.len());
    let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if count > 0 && count < order.len() {
        order.select_nth_unstable_by(count - 1, by_logit);
    }
    order.truncate(count);
    order.sort_unstable_by(by_logit);
    order.into_iter().map(|id| (id, logits[id as usize] - normaliser)).collect()
}

#[cfg(test)]
mod tests {
    use router_openai::CompletionRequest;

    use super::*;

    fn sampling(extra: &str) -> Sampling {
        let body = format!("{{\"prompt\":\"x\"{extra}}}");
        CompletionRequest::parse(body.as_bytes()).expect("parses").sampling
    }

    fn counts(sampling: &Sampling, logits: &[f32], output: &[u32]) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        for seed in 0..4000 {
            counts[choose(logits, sampling, seed, &[], output, &[], &[]).token as usize] += 1;
        }
        counts
    }

    #[test]
    fn frequencies_follow_the_distribution() {
        let logits = [0.0, 2.0_f32.ln(), 4.0_f32.ln(), 1.0_f32.ln()];
        let seen = counts(&sampling(""), &logits, &[]);
        for (count, share) in seen.iter().zip([1.0, 2.0, 4.0, 1.0]) {
            let expected = share / 8.0 * 4000.0;
            assert!((*count as f64 - expected).abs() < 5.0 * expected.sqrt(), "{seen:?}");
        }
    }

    #[test]
    fn filters_keep_what_they_should() {
        let logits = [8.0_f32.ln(), 4.0_f32.ln(), 2.0_f32.ln(), 2.0_f32.ln()];
        let kept =
            |extra: &str| counts(&sampling(extra), &logits, &[]).iter().filter(|&&count| count > 0).count();
        assert_eq!(kept(""), 4);
        assert_eq!(kept(",\"top_k\":2"), 2);
        assert_eq!(kept(",\"top_p\":0.5"), 1);
        assert_eq!(kept(",\"top_p\":0.51"), 2);
        assert_eq!(kept(",\"min_p\":0.4"), 2);
        assert_eq!(kept(",\"temperature\":0"), 1);
        assert_eq!(kept(",\"logit_bias\":{\"0\":-100}"), 3);
    }

    #[test]
    fn penalties_and_bans_act_on_the_right_tokens() {
        let logits = [1.0, 0.9, -1.0];
        let pick = |extra: &str, prompt: &[u32], output: &[u32], banned: &[u32]| {
            let sampling = sampling(&format!(",\"temperature\":0{extra}"));
            choose(&logits, &sampling, 0, prompt, output, &[], banned).token
        };
        assert_eq!(pick("", &[], &[0], &[]), 0);
        assert_eq!(pick(",\"presence_penalty\":0.2", &[], &[0], &[]), 1);
        assert_eq!(pick(",\"presence_penalty\":0.2", &[0], &[], &[]), 0, "the prompt does not count");
        assert_eq!(pick(",\"frequency_penalty\":0.06", &[], &[0], &[]), 0);
        assert_eq!(pick(",\"frequency_penalty\":0.06", &[], &[0, 0], &[]), 1);
        assert_eq!(pick(",\"repetition_penalty\":1.2", &[0], &[], &[]), 1, "the prompt does count");
        assert_eq!(pick("", &[], &[], &[0, 1]), 2);
    }

    #[test]
    fn a_resumed_request_draws_the_same_numbers() {
        let logits: Vec<f32> = (0..50).map(|n| (n as f32 * 0.7).sin()).collect();
        let sampling = sampling("");
        let whole = choose(&logits, &sampling, 9, &[1, 2, 3], &[4, 5], &[], &[]);
        let resumed = choose(&logits, &sampling, 9, &[1, 2, 3, 4, 5], &[], &[], &[]);
        assert_eq!(whole, resumed);
    }

    #[test]
    fn log_probabilities_are_of_the_raw_distribution() {
        let logits = [0.0, 2.0_f32.ln(), 5.0_f32.ln()];
        let choice = choose(&logits, &sampling(",\"temperature\":0,\"logprobs\":2"), 0, &[], &[], &[], &[2]);
        assert_eq!(choice.token, 1);
        assert!((choice.logprob - 0.25_f32.ln()).abs() < 1e-6);
        assert_eq!(choice.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2, 1]);
        assert!((choice.top[0].1 - 0.625_f32.ln()).abs() < 1e-6);
        let masked = [0.0, f32::NEG_INFINITY, f32::NEG_INFINITY];
        let choice = choose(&masked, &sampling(",\"logprobs\":3"), 0, &[], &[], &[], &[]);
        assert_eq!((choice.token, choice.top), (0, vec![(0, 0.0)]), "masked tokens have no log-probability");
        let only_suppressed = choose(&masked, &sampling(""), 0, &[], &[], &[0, 7], &[]);
        assert_eq!(only_suppressed.token, 0, "a grammar that leaves one token gets it");
    }
}
