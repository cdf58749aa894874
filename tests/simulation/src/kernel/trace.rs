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
        self.add_bytes(kind.as_bytes());
        for word in [now, first, second] {
            self.add(word);
        }
        if self.prints {
            super::report::print(&format!("{:>6} {now:>14} {kind} {first} {second}\n", self.steps));
        }
    }

    /// Adds the content of a packet, which is not printed.
    pub(crate) fn add_bytes(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(word));
        }
        self.add(bytes.len() as u64);
    }

    fn add(&mut self, word: u64) {
        self.hash = (self.hash ^ word).wrapping_mul(0x9FB2_1C65_1E98_DF25).rotate_left(29);
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }
}
