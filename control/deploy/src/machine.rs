//! Workers of one machine, each with its own ports and devices.

use crate::engine::{self, EVENTS, Program, REPLAY, WorkerAddress};
use crate::graph::{Graph, Role, RoleSpec};

/// Port of the first worker.
const FIRST_PORT: u16 = 8100;
/// Distance between the ports of two workers: engines add the number of a data-parallel rank to each port.
const PORTS_PER_WORKER: u16 = 16;
/// Most workers of one machine: a worker's further ports are offset by the ports of this many workers.
const MACHINE_WORKERS_MAX: usize = ((REPLAY - EVENTS) / PORTS_PER_WORKER) as usize;
/// Last port of all workers: five offsets, of which the last is the bootstrap server's.
const LAST_PORT: u16 = FIRST_PORT + 5 * EVENTS;

/// A worker on the machine.
pub(crate) struct Worker<'a> {
    /// Role and index, like `decode-0`.
    pub(crate) name: String,
    pub(crate) spec: &'a RoleSpec,
    pub(crate) port: u16,
    /// GPU indices, like `0,1`; empty without GPUs.
    pub(crate) devices: String,
}

/// Assigns the workers of a graph to ports and devices of one machine.
pub(crate) fn workers(graph: &Graph) -> Result<Vec<Worker<'_>>, String> {
    if graph.gateway.replicas > 1 {
        return Err("gateway: replicas is more than 1, and there is one machine here".to_owned());
    }
    if (FIRST_PORT..LAST_PORT).contains(&graph.gateway.port) {
        return Err(format!("gateway: ports {FIRST_PORT} to {} are the workers'", LAST_PORT - 1));
    }
    let (mut workers, mut device) = (Vec::new(), 0);
    for spec in &graph.role {
        if spec.nodes > 1 {
            return Err(format!(
                "role {}: nodes is {}, and all workers are on one machine here",
                spec.role.name(),
                spec.nodes
            ));
        }
        let gpus = graph.gpus(spec);
        for number in 0..spec.count() {
            let devices: Vec<String> = (device..device + gpus).map(|device| device.to_string()).collect();
            device += gpus;
            if workers.len() == MACHINE_WORKERS_MAX {
                return Err(format!("role: more than {MACHINE_WORKERS_MAX} workers on one machine"));
            }
            workers.push(Worker {
                name: format!("{}-{number}", spec.role.name()),
                spec,
                port: FIRST_PORT + PORTS_PER_WORKER * workers.len() as u16,
                devices: devices.join(","),
            });
        }
    }
    Ok(workers)
}

impl Worker<'_> {
    /// Returns the worker's process, listening on loopback.
    pub(crate) fn program(&self, graph: &Graph) -> Program {
        let place = WorkerAddress { listen: "127.0.0.1", own: "127.0.0.1", port: self.port, node: None };
        let mut program = engine::program(graph, self.spec, &place);
        if !self.devices.is_empty() {
            program.environment.insert("CUDA_VISIBLE_DEVICES".to_owned(), self.devices.clone());
        }
        program
    }

    /// Returns the worker's role and URL, for gateways on the same machine.
    pub(crate) fn url(&self) -> (Role, String) {
        (self.spec.role, format!("http://127.0.0.1:{}", self.port))
    }
}
