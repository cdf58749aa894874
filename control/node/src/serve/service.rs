//! A child process: its command line and its present run.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use control_config::Settings;
use dataplane_rails::{SECRET_VARIABLE, shared_key};
use tokio::process::{Child, Command};

use crate::compose;

/// Lifetime after which a child's restart pause is reset to the shortest one.
const STABLE_AFTER: Duration = Duration::from_secs(30);

/// Secrets that the processes of one run share.
#[derive(Clone)]
pub(super) struct Secrets {
    /// Key with which a child authenticates at the gateway's restricted routes, and the gateway at other
    /// gateways.
    pub(super) peer_key: String,
    /// Secret of transfers between the workers; `None`: the configuration or the environment sets it.
    transfer: Option<String>,
}

impl Secrets {
    /// Takes the secrets of the environment and generates those that are not set.
    pub(super) fn new(settings: &Settings) -> Result<Self> {
        let peer_key = compose::peer_key().map_or_else(router_access::new_secret, Ok)?;
        // Processes outside this run cannot know a generated secret: with any of them configured, none is
        // generated.
        let gateway = &settings.gateway;
        let others = [
            &settings.remote_tier.nodes,
            &gateway.workers,
            &gateway.prefill_workers,
            &gateway.decode_workers,
        ];
        let has_secret = shared_key(&settings.transfer.secret_file)?.is_secret();
        let draws_own = !has_secret && others.iter().all(|others| others.is_empty());
        if !has_secret && !draws_own {
            tracing::info!(
                "no transfer secret is generated: processes outside this run are configured, and could not know it"
            );
        }
        let transfer = draws_own.then(router_access::new_secret).transpose()?;
        Ok(Self { peer_key, transfer })
    }
}

/// A child's command line and its present process.
pub(super) struct Service {
    pub(super) name: String,
    pub(super) arguments: Vec<String>,
    secrets: Secrets,
    child: Option<Child>,
    started: Instant,
    pause: Duration,
    start_at: Instant,
    /// Times that the child has exited or failed to start.
    pub(super) ends: u32,
}

impl Service {
    pub(super) fn new(name: String, arguments: Vec<String>, secrets: &Secrets, settings: &Settings) -> Self {
        let now = Instant::now();
        Self {
            name,
            arguments,
            secrets: secrets.clone(),
            child: None,
            started: now,
            pause: settings.serve.restart_pause,
            start_at: now,
            ends: 0,
        }
    }

    fn start(&mut self) -> Result<()> {
        let program = std::env::current_exe().context("the path of this program")?;
        let child = Command::new(program)
            .args(&self.arguments)
            .env(compose::PEER_KEY, &self.secrets.peer_key)
            .envs(self.secrets.transfer.iter().map(|secret| (SECRET_VARIABLE, secret)))
            .stdin(Stdio::null())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", self.name))?;
        self.child = Some(child);
        self.started = Instant::now();
        Ok(())
    }

    /// Starts the child when its pause is over, records its exit, and schedules its restart.
    pub(super) fn watch(&mut self, settings: &Settings) -> Result<()> {
        match &mut self.child {
            None if Instant::now() >= self.start_at => {
                // Starting may fail, for example with too many processes: the other children continue, and
                // the start is retried.
                if let Err(error) = self.start() {
                    eprintln!("\r{error:#}; trying again in {} ms", self.pause.as_millis());
                    self.ends += 1;
                    self.start_at = Instant::now() + self.pause;
                    self.pause = (self.pause * 2).min(settings.serve.restart_pause_max);
                }
                Ok(())
            }
            None => Ok(()),
            Some(child) => {
                if let Some(status) = child.try_wait()? {
                    self.child = None;
                    self.ends += 1;
                    if self.started.elapsed() > STABLE_AFTER {
                        self.pause = settings.serve.restart_pause;
                    }
                    eprintln!(
                        "\r{} ended ({status}); starting it again in {} ms",
                        self.name,
                        self.pause.as_millis()
                    );
                    self.start_at = Instant::now() + self.pause;
                    self.pause = (self.pause * 2).min(settings.serve.restart_pause_max);
                }
                Ok(())
            }
        }
    }

    /// Whether the service has no process or its process has exited.
    pub(super) fn has_ended(&mut self) -> bool {
        self.child.as_mut().is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
    }

    pub(super) fn signal(&self, signal: rustix::process::Signal) {
        let id =
            self.child.as_ref().and_then(Child::id).and_then(|id| rustix::process::Pid::from_raw(id as i32));
        if let Some(id) = id {
            // A child that has just exited needs no signal.
            let _ended = rustix::process::kill_process(id, signal);
        }
    }

    /// Stops the child and waits for it; returns false if it had to be killed.
    pub(super) async fn stop(&mut self, within: Duration) -> bool {
        self.signal(rustix::process::Signal::TERM);
        let Some(child) = &mut self.child else { return true };
        if tokio::time::timeout(within, child.wait()).await.is_ok() {
            return true;
        }
        // The child is certain to exit now; a failure to kill it cannot be handled here.
        let _killed = child.kill().await;
        false
    }
}
