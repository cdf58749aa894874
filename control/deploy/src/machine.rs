//! Workers of one machine: each has a port and devices of its own.

use crate::engine::{self, Place, Program};
use crate::graph::{Graph, Role, RoleSpec};

/// Port of the first worker. The others follow, and each has further ports at fixed distances.
const FIRST_PORT: u16 = 8100;
/// Workers of one machine at most: there are as many ports between two distances.
const WORKERS_MAX: usize = 256;

/// One worker.
pub(crate) struct Worker<'a> {
    /// Its role and number.
    pub(crate) name: String,
    pub(crate) spec: &'a RoleSpec,
    pub(crate) port: u16,
    /// GPUs, as `0,1`; empty without any.
    pub(crate) devices: String,
}

/// The workers of a graph on one machine.
pub(crate) fn workers(graph: &Graph) -> Result<Vec<Worker<'_>>, String> {
    let (mut workers, mut device) = (Vec::new(), 0);
    for spec in &graph.role {
        if spec.nodes > 1 {
            return Err(format!(
                "role {}: nodes is {}, and all workers are on one machine here",
                spec.role.name(),
                spec.nodes
            ));
        }
        // Reference and mock engines compute on the CPU.
        let gpus = if graph.engine.is_own() { 0 } else { spec.gpus };
        for number in 0..spec.workers {
            let devices: Vec<String> = (device..device + gpus).map(|device| device.to_string()).collect();
            device += gpus;
            if workers.len() == WORKERS_MAX {
                return Err(format!("more than {WORKERS_MAX} workers on one machine"));
            }
            workers.push(Worker {
                name: format!("{}-{number}", spec.role.name()),
                spec,
                port: FIRST_PORT + workers.len() as u16,
                devices: devices.join(","),
            });
        }
    }
    let last = FIRST_PORT + workers.len() as u16;
    match (FIRST_PORT..last).contains(&graph.gateway.port) {
        true => {
            Err(format!("gateway: port {} is a worker's ({FIRST_PORT} to {})", graph.gateway.port, last - 1))
        }
        false => Ok(workers),
    }
}

impl Worker<'_> {
    /// Its process, on loopback.
    pub(crate) fn program(&self, graph: &Graph) -> Program {
        let place = Place { listen: "127.0.0.1", own: "127.0.0.1", port: self.port, node: None };
        let mut program = engine::program(graph, self.spec, &place);
        if !self.devices.is_empty() {
            program.environment.insert("CUDA_VISIBLE_DEVICES".to_owned(), self.devices.clone());
        }
        program
    }

    /// Its role and URL, for gateways of the same machine.
    pub(crate) fn url(&self) -> (Role, String) {
        (self.spec.role, format!("http://127.0.0.1:{}", self.port))
    }
}

/// A line that says what is not done where the planner cannot start workers.
pub(crate) fn fixed_counts(graph: &Graph) -> &'static str {
    if graph.is_planned() {
        "# The numbers of workers are fixed here: `max` needs Kubernetes, or `kvasir serve`.\n"
    } else {
        ""
    }
}
