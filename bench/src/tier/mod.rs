//! The tiers behind a worker's pool: their gain for conversations, that they are never worse than recomputing,
//! and that no data is lost, left over or wrong after a long time.

mod conversations;
mod files;
mod slow;
mod soak;
mod sweep;

use anyhow::Result;
use clap::{Args, Subcommand};

/// The part of the benchmark to run.
#[derive(Args, Default)]
pub(crate) struct TierArgs {
    #[command(subcommand)]
    part: Option<Part>,
}

#[derive(Subcommand)]
enum Part {
    /// Conversations of many users with the reference engine, whose pool holds a part of them: time to the first token and
    /// tokens per second with no tier, host memory, and the tiers below it. Outputs must be equal in all.
    Conversations(conversations::ConversationArgs),
    /// Prefixes of many lengths behind an artificially slow disk: time of the plan beside that of always
    /// onboarding and of never onboarding.
    Sweep(sweep::SweepArgs),
    /// Data through host memory and a disk for a given time: every byte read back is compared, and at the end
    /// memory, files, leases, threads and descriptors are judged.
    Soak(soak::SoakArgs),
}

pub(crate) fn run(smoke: bool, args: &TierArgs) -> Result<()> {
    match &args.part {
        Some(Part::Conversations(args)) => conversations::run(smoke, args),
        Some(Part::Sweep(args)) => sweep::run(smoke, args),
        Some(Part::Soak(args)) => soak::run(smoke, args),
        None => {
            conversations::run(smoke, &conversations::ConversationArgs::default())?;
            sweep::run(smoke, &sweep::SweepArgs::default())?;
            // The full soak takes long and must be requested by name.
            if smoke { soak::run(smoke, &soak::SoakArgs::default()) } else { Ok(()) }
        }
    }
}
