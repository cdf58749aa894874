//! The gateway and the workers of this machine, as child processes.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Instant;

use anyhow::{Context, Result};
use control_config::Settings;

use crate::serve::service::{Secrets, Service};
use crate::{GlobalArgs, LogFormat, Role, process};

/// Fewest cores per process with which processes are pinned.
const CORES_EACH_MIN: usize = 2;

pub(super) struct LocalWorker {
    pub(super) service: Service,
    pub(super) role: Role,
    /// Number of the worker within its role. The lowest free number is used, so that a new worker reuses the
    /// disk tier of its predecessor.
    number: u64,
    pub(super) url: String,
    pub(super) asked: Instant,
    /// Whether the gateway has reported this run of the worker as ready.
    pub(super) was_ready: bool,
    /// Whether the gateway has the worker in its list.
    pub(super) is_known: bool,
    /// Time since which the worker drains; `None`: it does not drain.
    pub(super) draining_since: Option<Instant>,
    /// Time at which the worker's process was sent SIGTERM; `None`: it was not.
    pub(super) stopping: Option<Instant>,
    /// Consecutive polls in which the worker was draining and had no request.
    pub(super) idle_polls: u32,
}

pub(super) struct LocalFleet<'a> {
    settings: &'a Settings,
    secrets: &'a Secrets,
    /// Command-line arguments that every child gets.
    child_arguments: Vec<String>,
    /// Command-line arguments of the gateway, without its workers.
    gateway_arguments: Vec<String>,
    /// Threads of a worker that is not pinned to cores.
    shared_threads: usize,
    pub(super) gateway: Service,
    pub(super) workers: Vec<LocalWorker>,
}

pub(super) fn free_address() -> Result<SocketAddr> {
    let probe = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port")?;
    Ok(probe.local_addr()?)
}

/// Returns the core list and the number of cores for process `index` of `count`; `None` if there are too few
/// cores.
fn cores_of(settings: &Settings, index: usize, count: usize) -> Option<(String, usize)> {
    let cores = process::available_cores();
    if !settings.serve.pin_cores || cores < count * CORES_EACH_MIN {
        return None;
    }
    let (first, after) = (cores * index / count, cores * (index + 1) / count);
    Some((format!("{first}-{}", after - 1), after - first))
}

impl<'a> LocalFleet<'a> {
    pub(super) fn new(
        common: &GlobalArgs,
        settings: &'a Settings,
        listen: SocketAddr,
        aside: Option<SocketAddr>,
        secrets: &'a Secrets,
    ) -> Result<Self> {
        let mut child_arguments = vec!["--supervised".to_owned(), "--log".to_owned(), common.log.clone()];
        if common.log_format == LogFormat::Json {
            child_arguments.extend(["--log-format".to_owned(), "json".to_owned()]);
        }
        if let Some(config) = &common.config {
            let config = config.canonicalize().unwrap_or_else(|_| config.clone());
            child_arguments.extend(["--config".to_owned(), config.display().to_string()]);
        }
        let serve = &settings.serve;
        let prefill = (0..serve.prefill_workers).map(|_| Role::Prefill);
        // Without prefill workers, every worker both prefills and decodes.
        let decode_role = if serve.prefill_workers == 0 { Role::Both } else { Role::Decode };
        let roles: Vec<Role> = prefill.chain((0..serve.decode_workers).map(|_| decode_role)).collect();
        let count = roles.len() + 1;
        let mut gateway_arguments = vec!["gateway".to_owned(), "--listen".to_owned(), listen.to_string()];
        gateway_arguments
            .extend(aside.into_iter().flat_map(|aside| ["--aside".to_owned(), aside.to_string()]));
        gateway_arguments.extend(
            cores_of(settings, 0, count).into_iter().flat_map(|(cores, _)| ["--cores".to_owned(), cores]),
        );
        gateway_arguments.extend(child_arguments.iter().cloned());
        let mut fleet = Self {
            settings,
            secrets,
            child_arguments,
            gateway: Service::new("gateway".to_owned(), Vec::new(), secrets, settings),
            gateway_arguments,
            shared_threads: (process::available_cores() / roles.len()).max(1),
            workers: Vec::new(),
        };
        for (index, role) in roles.into_iter().enumerate() {
            let worker = fleet.add(role, cores_of(settings, index + 1, count))?;
            worker.is_known = true;
        }
        fleet.update_gateway_arguments();
        Ok(fleet)
    }

    /// Starts a worker, pinned to `cores` if given.
    pub(super) fn add(&mut self, role: Role, cores: Option<(String, usize)>) -> Result<&mut LocalWorker> {
        let is_used =
            |number: &u64| self.workers.iter().any(|worker| worker.role == role && worker.number == *number);
        let number = (0..).find(|number| !is_used(number)).unwrap_or_default();
        let address = self.free_address()?;
        let mut arguments = vec!["worker".to_owned(), "--role".to_owned(), role.name().to_owned()];
        arguments.extend(["--listen".to_owned(), address.to_string()]);
        arguments.extend(["--instance".to_owned(), format!("{}-{number}", role.name())]);
        if self.settings.engine.threads == 0 {
            let threads = cores.as_ref().map_or(self.shared_threads, |(_, cores)| *cores);
            arguments.extend(["--threads".to_owned(), threads.to_string()]);
        }
        arguments.extend(cores.into_iter().flat_map(|(cores, _)| ["--cores".to_owned(), cores]));
        arguments.extend(self.child_arguments.iter().cloned());
        let name = format!("{} worker {number}", role.name());
        self.workers.push(LocalWorker {
            service: Service::new(name, arguments, self.secrets, self.settings),
            role,
            number,
            url: format!("http://{address}"),
            asked: Instant::now(),
            was_ready: false,
            is_known: false,
            draining_since: None,
            stopping: None,
            idle_polls: 0,
        });
        let last = self.workers.len() - 1;
        Ok(&mut self.workers[last])
    }

    /// Returns an address that no worker uses, including workers that are waiting for a restart.
    fn free_address(&self) -> Result<SocketAddr> {
        loop {
            let address = free_address()?;
            let url = format!("http://{address}");
            if !self.workers.iter().any(|worker| worker.url == url) {
                return Ok(address);
            }
        }
    }

    /// Sets the gateway's arguments to the present workers; they take effect when the gateway starts again.
    pub(super) fn update_gateway_arguments(&mut self) {
        let staying = self.workers.iter().filter(|worker| worker.draining_since.is_none());
        let workers = staying.flat_map(|worker| ["--worker".to_owned(), worker.url.clone()]);
        self.gateway.arguments = self.gateway_arguments.iter().cloned().chain(workers).collect();
    }

    /// Returns all children, the gateway first.
    pub(super) fn services(&mut self) -> impl Iterator<Item = &mut Service> {
        let workers = self.workers.iter_mut().map(|worker| &mut worker.service);
        std::iter::once(&mut self.gateway).chain(workers)
    }

    /// Starts due children and records which have exited. A worker that exits while it drains is not
    /// restarted.
    pub(super) fn watch(&mut self) -> Result<()> {
        self.gateway.watch(self.settings)?;
        let staying = self.workers.iter_mut().filter(|worker| worker.draining_since.is_none());
        staying.map(|worker| &mut worker.service).try_for_each(|service| service.watch(self.settings))
    }

    /// Returns a child that has exited at least `ends_max` times, with its count.
    pub(super) fn failed(&mut self, ends_max: u32) -> Option<(String, u32)> {
        let failed = self.services().find(|service| service.ends >= ends_max)?;
        Some((failed.name.clone(), failed.ends))
    }

    pub(super) fn names(&self) -> Vec<&str> {
        let workers = self.workers.iter().map(|worker| worker.service.name.as_str());
        std::iter::once(self.gateway.name.as_str()).chain(workers).collect()
    }
}
