//! Leader election by a lease in Kubernetes or etcd.
//!
//! ```text
//!            the lease is free, or was not renewed for its duration
//! Follower ─────────────────────────────────────────────────────────▶ Leader
//!          ◀─────────────────────────────────────────────────────────
//!            another process holds it, or it could not be renewed for RENEW_WITHIN
//! ```
//!
//! [`run`] tries every [`RETRY_EVERY`] to renew or take the lease ([`Lease::attempt`]). A leader gives up
//! before other processes may take over ([`RENEW_WITHIN`] against [`LEASE_DURATION`]), by its own clock,
//! however long a request takes. The times are those of client-go's `leaderelection`.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// Time after its last renewal for which other processes respect a lease.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Time without a renewal after which a leader gives up.
pub const RENEW_WITHIN: Duration = Duration::from_secs(10);
/// Interval between two attempts.
pub const RETRY_EVERY: Duration = Duration::from_secs(2);

/// A lease that one process holds at a time.
pub trait Lease {
    /// Error of a failed attempt.
    type Error: Display;

    /// Name of the lease, for the log.
    fn name(&self) -> &str;

    /// Reads the lease, renews it if this process holds it, takes it if it is free; returns whether this
    /// process holds it now.
    fn attempt(&mut self) -> impl Future<Output = Result<bool, Self::Error>> + Send;

    /// Releases the lease, so that no other process has to wait for its expiry.
    fn release(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// Takes part in an election until `leads`, which tells whether this process leads, has no receiver. The
/// lease is then released.
pub async fn run(mut lease: impl Lease, leads: watch::Sender<bool>) {
    // Time of the last renewal, taken before the attempt because the server may have carried it out at any
    // time since.
    let mut renewed: Option<Instant> = None;
    while !leads.is_closed() {
        let asked = Instant::now();
        let give_up = renewed.unwrap_or(asked) + RENEW_WITHIN;
        let failure = match tokio::time::timeout_at(give_up, lease.attempt()).await {
            Ok(Ok(is_own)) => {
                renewed = is_own.then_some(asked);
                None
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("no answer".to_owned()),
        };
        // Leaves time for another attempt before the leader has to give up; an answer may also be late.
        let is_leader = renewed.is_some_and(|at| at.elapsed() + RETRY_EVERY < RENEW_WITHIN);
        if let Some(reason) = failure {
            if !is_leader {
                renewed = None;
            }
            tracing::warn!(
                lease = lease.name(),
                still_leads = is_leader,
                "the lease cannot be renewed: {reason}"
            );
        }
        if leads.send_replace(is_leader) != is_leader {
            tracing::info!(lease = lease.name(), is_leader, "leadership");
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY_EVERY) => {}
            () = leads.closed() => {}
        }
    }
    if renewed.is_some() {
        // If the release fails, another process waits until the lease expires.
        let _released = tokio::time::timeout(RETRY_EVERY, lease.release()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    type Answer = Result<bool, &'static str>;

    /// Answers of the next attempts, and whether the lease was released. Without an answer an attempt hangs.
    #[derive(Clone, Default)]
    struct Script(Arc<Mutex<(Vec<Answer>, bool)>>);

    impl Lease for Script {
        type Error = &'static str;

        fn name(&self) -> &str {
            "script"
        }

        async fn attempt(&mut self) -> Result<bool, &'static str> {
            let next = self.0.lock().expect("no panic").0.pop();
            match next {
                Some(answer) => answer,
                None => std::future::pending().await,
            }
        }

        async fn release(&mut self) -> Result<(), &'static str> {
            self.0.lock().expect("no panic").1 = true;
            Ok(())
        }
    }

    async fn seconds(seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_cannot_renew_gives_up_before_others_may_take_over() {
        for failing in [true, false] {
            let script = Script::default();
            // The last element is answered first.
            let rest = if failing { vec![Err("refused"); 10] } else { Vec::new() };
            script.0.lock().expect("no panic").0 = [rest, vec![Ok(true)]].concat();
            let (sender, mut leads) = watch::channel(false);
            let running = tokio::spawn(run(script.clone(), sender));
            let start = Instant::now();
            leads.wait_for(|leads| *leads).await.expect("it runs");
            leads.wait_for(|leads| !*leads).await.expect("it runs");
            let led = start.elapsed();
            assert!(led > Duration::from_secs(5) && led <= RENEW_WITHIN, "{failing}: {led:?}");
            drop(leads);
            running.await.expect("no panic");
            assert!(!script.0.lock().expect("no panic").1, "there is nothing to release");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_failure_ends_no_leadership_and_the_lease_is_released_at_the_end() {
        let script = Script::default();
        script.0.lock().expect("no panic").0 = vec![Ok(true), Ok(true), Err("refused"), Ok(true)];
        let (sender, leads) = watch::channel(false);
        let running = tokio::spawn(run(script.clone(), sender));
        for _ in 0..6 {
            seconds(1).await;
            assert!(*leads.borrow());
        }
        drop(leads);
        running.await.expect("no panic");
        assert!(script.0.lock().expect("no panic").1);
    }

    /// Each attempt takes this long, and succeeds.
    struct Slow(Duration);

    impl Lease for Slow {
        type Error = &'static str;

        fn name(&self) -> &str {
            "slow"
        }

        async fn attempt(&mut self) -> Result<bool, &'static str> {
            tokio::time::sleep(self.0).await;
            Ok(true)
        }

        async fn release(&mut self) -> Result<(), &'static str> {
            Ok(())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_answer_counts_as_long_as_there_is_time_for_another_attempt() {
        let spare = RENEW_WITHIN - RETRY_EVERY;
        for (takes, leads_then) in [(spare - Duration::from_millis(1), true), (spare, false)] {
            let (sender, leads) = watch::channel(false);
            let _running = tokio::spawn(run(Slow(takes), sender));
            tokio::time::sleep(takes + Duration::from_millis(1)).await;
            assert_eq!(*leads.borrow(), leads_then, "{takes:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_of_another_process_is_followed() {
        let script = Script::default();
        script.0.lock().expect("no panic").0 = vec![Ok(false), Ok(true), Ok(false)];
        let (sender, mut leads) = watch::channel(false);
        let _running = tokio::spawn(run(script.clone(), sender));
        seconds(1).await;
        assert!(!*leads.borrow());
        leads.wait_for(|leads| *leads).await.expect("it becomes free");
        leads.wait_for(|leads| !*leads).await.expect("another one took it");
    }
}
