//! The tiers that KV can be onboarded from, and sets of them.

/// Number of tiers.
pub(crate) const TIERS: usize = 4;

/// Tier that a block can come from; nominally fastest first, which decides between tiers with equal
/// measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Tier {
    /// Memory of this host.
    Host = 0,
    /// A local disk.
    Disk = 1,
    /// Memory of another node.
    Remote = 2,
    /// An object store.
    Object = 3,
}

impl Tier {
    /// Every tier, in order.
    pub const ALL: [Self; TIERS] = [Self::Host, Self::Disk, Self::Remote, Self::Object];

    /// Position in arrays that are kept per tier.
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

/// The tiers that hold a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct TierSet(u8);

impl TierSet {
    /// No tier.
    pub(crate) const EMPTY: Self = Self(0);

    /// This set and one more tier.
    #[must_use]
    pub(crate) const fn with(self, tier: Tier) -> Self {
        Self(self.0 | 1 << tier as u8)
    }

    /// Whether a tier is in.
    #[must_use]
    pub(crate) fn contains(self, tier: Tier) -> bool {
        self.0 >> tier.index() & 1 == 1
    }

    /// Whether none is in.
    #[must_use]
    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// A number below 2^[`TIERS`].
    pub(crate) fn class(self) -> usize {
        usize::from(self.0)
    }
}

impl FromIterator<Tier> for TierSet {
    fn from_iter<I: IntoIterator<Item = Tier>>(tiers: I) -> Self {
        tiers.into_iter().fold(Self::EMPTY, Self::with)
    }
}
