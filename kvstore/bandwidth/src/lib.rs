//! How many bytes may go now: one [`TokenBucket`] under every limit of the tiers, be it of a disk's writes, of copies to
//! other nodes, or of what moves while a request waits.
//!
//! The crate stands below all that have such limits, so that they mean the same everywhere. It knows a rate, a burst and
//! the time that it is given. That a limit is not set, and what that means, is its owner's: a bucket always has a rate.

#![forbid(unsafe_code)]

mod bucket;

pub use bucket::TokenBucket;
