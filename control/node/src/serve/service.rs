//! A child process: how to start it, and its present run.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use control_config::Settings;
use dataplane_rails::{SECRET_VARIABLE, shared_key};
use tokio::process::{Child, Command};

use crate::compose;

/// A child that lived this long starts again without a long pause.
const STABLE_AFTER: Duration = Duration::from_secs(30);

/// What the processes of one run show each other.
#[derive(Clone)]
pub(super) struct Secrets {
    /// Key that a child shows to the gateway's closed routes, and the gateway to other gateways.
    pub(super) peer_key: String,
    /// Secret of transfers between the workers; `None` where the configuration or the environment decides.
    transfer: Option<String>,
}

impl Secrets {
    /// Those of the environment, and fresh ones for what is not set.
    pub(super) fn new(settings: &Settings) -> Result<Self> {
        let peer_key = compose::peer_key().map_or_else(router_access::new_secret, Ok)?;
        // Others than the children share a secret that somebody has set, or none.
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
                "blocks move without a secret: others than the workers of this run are configured"
            );
        }
        let transfer = draws_own.then(router_access::new_secret).transpose()?;
        Ok(Self { peer_key, transfer })
    }
}

/// How to start a child, and its present process.
pub(super) struct Service {
    pub(super) name: String,
    pub(super) arguments: Vec<String>,
    secrets: Secrets,
    child: Option<Child>,
    started: Instant,
    pause: Duration,
    start_at: Instant,
    /// How often it has ended.
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

    /// Starts the child when it is time, notes its end, and plans its restart.
    pub(super) fn watch(&mut self, settings: &Settings) -> Result<()> {
        match &mut self.child {
            None if Instant::now() >= self.start_at => {
                // Too many processes, say: the others go on, and it is tried again.
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

    /// Whether it has no process, or one that has ended.
    pub(super) fn has_ended(&mut self) -> bool {
        self.child.as_mut().is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
    }

    pub(super) fn signal(&self, signal: rustix::process::Signal) {
        let id =
            self.child.as_ref().and_then(Child::id).and_then(|id| rustix::process::Pid::from_raw(id as i32));
        if let Some(id) = id {
            // A child that has just ended needs no signal.
            let _ended = rustix::process::kill_process(id, signal);
        }
    }

    /// Asks the child to stop and waits; false when it had to be killed.
    pub(super) async fn stop(&mut self, within: Duration) -> bool {
        self.signal(rustix::process::Signal::TERM);
        let Some(child) = &mut self.child else { return true };
        if tokio::time::timeout(within, child.wait()).await.is_ok() {
            return true;
        }
        // Its end is certain now; nothing more can be done about a failure here.
        let _killed = child.kill().await;
        false
    }
}
