//! Hash over the steps of a run.

/// Hash over each step of the kernel, by which two runs are compared.
#[derive(Debug)]
pub(crate) struct Trace {
    hash: u64,
    steps: u64,
    /// Whether steps are also printed, for comparing two runs that differ.
    prints: bool,
}

impl Trace {
    pub(crate) fn new(seed: u64, prints: bool) -> Self {
        Self { hash: seed ^ 0xcbf2_9ce4_8422_2325, steps: 0, prints }
    }

    /// Adds a step: its kind, and two numbers that belong to it.
    pub(crate) fn step(&mut self, kind: &'static str, now: u64, first: u64, second: u64) {
        self.steps += 1;
        for word in [kind.len() as u64 ^ u64::from(kind.as_bytes()[0]) << 8, now, first, second] {
            self.hash = (self.hash ^ word).wrapping_mul(0x9FB2_1C65_1E98_DF25).rotate_left(29);
        }
        if self.prints {
            super::report::print(&format!("{:>6} {now:>14} {kind} {first} {second}\n", self.steps));
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }
}
