//! Starting and stopping mocks.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use tokio::task::JoinHandle;

use crate::events::EventPublisher;
use crate::output_generator::OutputGenerator;
use crate::server::{self, Message, ServerState, Text, WorkerAddresses};
use crate::worker::{Model, Worker};
use crate::{Fault, MockConfig, MockError, MockStats, lease};

/// Most workers that [`fleet`] starts: each has a listening port.
pub const FLEET_MAX: usize = 20_000;

/// A running mock engine. Dropping it stops it.
pub struct Mock {
    served: Arc<ServerState>,
    task: JoinHandle<()>,
    events: Option<EventPublisher>,
}

impl std::fmt::Debug for Mock {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Mock({})", self.url())
    }
}

fn model(config: &MockConfig) -> Arc<Model> {
    let text = config.tokenizer.clone();
    let message = |role: &'static str, content: &'static str| Message {
        role: Text(role.into()),
        content: Text(content.into()),
        ..Message::default()
    };
    let probe = [message("system", "a"), message("user", " b\n"), message("tool", "c")];
    let json = probe.iter().map(|message| {
        serde_json::json!({ "role": message.role.0.as_ref(), "content": message.content.0.as_ref() })
    });
    let rendered = text.render_chat(&json.collect(), true, &serde_json::Map::new());
    let is_tiny = rendered.is_ok_and(|rendered| rendered == server::tiny_chat(&probe, true));
    Arc::new(Model { generator: OutputGenerator::new(&text, config.eos_one_in), text, is_tiny })
}

impl Mock {
    /// Starts a worker that listens on `listen` (port 0 lets the system choose).
    pub async fn start(config: MockConfig, listen: SocketAddr) -> Result<Self, MockError> {
        config.check()?;
        let model = model(&config);
        Self::start_shared(config, model, listen).await
    }

    async fn start_shared(
        config: MockConfig,
        model: Arc<Model>,
        listen: SocketAddr,
    ) -> Result<Self, MockError> {
        let failed = |error: std::io::Error| MockError::Listen {
            address: listen.to_string(),
            reason: error.to_string(),
        };
        let listener = server::listen(listen).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (mut events, mut sink) = (None, None);
        if config.events {
            let bound =
                EventPublisher::bind(address.ip(), &config.topic, config.replay, config.dialect).await?;
            (events, sink) = (Some(bound.0), Some(bound.1));
        }
        let addresses = WorkerAddresses {
            address,
            events_port: events.as_ref().map(|events| events.events_port),
            replay_port: events.as_ref().and_then(|events| events.replay_port),
        };
        let worker = Worker::new(config, model, sink);
        lease::register(&worker);
        let served = Arc::new(ServerState::new(worker, addresses));
        let task = tokio::spawn(server::serve(listener, Arc::clone(&served)));
        Ok(Self { served, task, events })
    }

    /// `http://host:port`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.served.addresses.address)
    }

    /// Address on which the worker listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.served.addresses.address
    }

    /// Endpoints (`tcp://…`) of the KV events and of their replay, if there are any.
    #[must_use]
    pub fn event_endpoints(&self) -> (Option<String>, Option<String>) {
        let host = self.served.addresses.address.ip();
        let endpoint = |port: u16| format!("tcp://{}", SocketAddr::new(host, port));
        (self.served.addresses.events_port.map(endpoint), self.served.addresses.replay_port.map(endpoint))
    }

    /// The worker's counters and levels.
    #[must_use]
    pub fn stats(&self) -> MockStats {
        self.served.worker.stats()
    }

    /// Arms a fault, replacing the one of its kind.
    pub fn fault(&self, fault: Fault) -> Result<(), MockError> {
        self.served.worker.faults.arm(fault)
    }

    /// Disarms all faults.
    pub fn heal(&self) {
        self.served.worker.faults.heal();
    }

    /// Makes the worker unavailable to other mocks of this process: its blocks cannot be fetched any more.
    pub fn unregister(&self) {
        lease::unregister(&self.served.worker);
    }

    /// Stops at once, like a killed process: connections are cut, and the worker's state is lost.
    pub async fn stop(mut self) {
        self.events.take();
        self.served.worker.stop();
        self.task.abort();
        // Cancelled on purpose; the port is free afterwards.
        let _cancelled = (&mut self.task).await;
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.unregister();
        self.served.worker.stop();
        self.task.abort();
    }
}

/// Starts `count` workers on ports of 127.0.0.1 that the system chooses. They share tokenizer and alphabet;
/// their seeds count up from the configuration's.
pub async fn fleet(config: MockConfig, count: usize) -> Result<Vec<Mock>, MockError> {
    config.check()?;
    if count > FLEET_MAX {
        return Err(MockError::Config(format!("{count} workers are more than {FLEET_MAX}")));
    }
    let model = model(&config);
    let listen = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
    let mut mocks = Vec::with_capacity(count);
    for number in 0..count as u64 {
        let config = MockConfig { seed: config.seed.wrapping_add(number), ..config.clone() };
        mocks.push(Mock::start_shared(config, Arc::clone(&model), listen).await?);
    }
    Ok(mocks)
}
