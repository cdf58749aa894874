//! Distribution of the available GPUs among pools, respected at every instant of a change.

/// One pool's request for workers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Claim {
    /// Fewest workers.
    pub(crate) min: u32,
    /// Workers that demand needs; at least `min`.
    pub(crate) wanted: u32,
    /// Workers that exist and are not draining.
    pub(crate) current: u32,
    /// Workers that are draining: their GPUs are in use until they end.
    pub(crate) draining: u32,
    /// GPUs of a worker.
    pub(crate) gpus: u32,
}

/// Returns the counts that keep to the budget, one for each claim.
///
/// If the GPUs do not suffice, the pool with the smallest share of its wanted count is served first: the
/// slowest role limits the fleet. A pool grows only into GPUs that are free now; the GPUs of shrinking pools
/// become available when their workers have ended. Running workers of a pool's minimum stay, even beyond a
/// budget that was lowered.
pub(crate) fn fit(claims: &[Claim], gpus_max: u32) -> Vec<u32> {
    let targets = targets(claims, gpus_max);
    let held = |claim: &Claim, target: u32| (claim.current.max(target) + claim.draining) * claim.gpus;
    let mut counts: Vec<u32> =
        claims.iter().zip(&targets).map(|(claim, &target)| target.min(claim.current)).collect();
    let mut free = i64::from(gpus_max)
        - claims.iter().zip(&counts).map(|(claim, &count)| i64::from(held(claim, count))).sum::<i64>();
    while let Some(at) =
        least_served(claims, &counts, |at| counts[at] < targets[at] && fits(&claims[at], free))
    {
        counts[at] += 1;
        free -= i64::from(claims[at].gpus);
    }
    counts
}

/// Returns the counts that would be right if no GPU were in use.
fn targets(claims: &[Claim], gpus_max: u32) -> Vec<u32> {
    let mut counts: Vec<u32> = claims.iter().map(|claim| claim.min).collect();
    let used: u32 = claims.iter().zip(&counts).map(|(claim, &count)| count * claim.gpus).sum();
    let mut free = i64::from(gpus_max) - i64::from(used);
    while let Some(at) =
        least_served(claims, &counts, |at| counts[at] < claims[at].wanted && fits(&claims[at], free))
    {
        counts[at] += 1;
        free -= i64::from(claims[at].gpus);
    }
    counts
}

fn fits(claim: &Claim, free: i64) -> bool {
    i64::from(claim.gpus) <= free
}

/// Returns the pool with the smallest share of its wanted count, among those that can grow.
fn least_served(claims: &[Claim], counts: &[u32], can_grow: impl Fn(usize) -> bool) -> Option<usize> {
    let share = |at: usize| f64::from(counts[at]) / f64::from(claims[at].wanted.max(1));
    (0..claims.len()).filter(|&at| can_grow(at)).min_by(|&a, &b| share(a).total_cmp(&share(b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(wanted: u32, current: u32) -> Claim {
        Claim { min: 1, wanted, current, draining: 0, gpus: 1 }
    }

    #[test]
    fn everyone_gets_what_fits_and_the_slowest_role_first() {
        assert_eq!(fit(&[claim(3, 1), claim(2, 1)], 8), [3, 2]);
        assert_eq!(fit(&[claim(8, 1), claim(4, 1)], 6), [4, 2]);
        let large = Claim { gpus: 4, ..claim(2, 1) };
        assert_eq!(fit(&[large, claim(4, 1)], 8), [1, 4], "a worker of four GPUs does not fit");
    }

    /// Dynamo #12428: a shift between two pools exceeded the budget between its two updates.
    #[test]
    fn a_shift_between_roles_goes_down_first() {
        assert_eq!(fit(&[claim(6, 2), claim(2, 6)], 8), [2, 2], "their GPUs are in use still");
        let draining = Claim { draining: 4, ..claim(2, 2) };
        assert_eq!(fit(&[claim(6, 2), draining], 8), [2, 2]);
        let draining = Claim { draining: 1, ..claim(2, 2) };
        assert_eq!(fit(&[claim(6, 2), draining], 8), [5, 2]);
        assert_eq!(fit(&[claim(6, 5), claim(2, 2)], 8), [6, 2]);
    }

    #[test]
    fn what_runs_beyond_a_budget_that_was_lowered_goes_down() {
        assert_eq!(fit(&[claim(6, 6)], 4), [4]);
        assert_eq!(fit(&[Claim { min: 3, ..claim(3, 0) }], 2), [2], "no more than there is");
    }
}
