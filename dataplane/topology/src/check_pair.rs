//! Checks of one decision: problems that neither of the two nodes shows alone.

use crate::check::warning;
use crate::description::NodeDescription;
use crate::distance::Distance;
use crate::path::{Decision, Request, Transport};
use crate::reach::same_host;
use crate::topology::{Memory, Topology};
use crate::warning::{Code, Warning};

/// Returns the warnings that only a pair of nodes shows.
pub(crate) fn pair_warnings(
    topology: &Topology,
    here: &NodeDescription,
    remote: &NodeDescription,
    request: &Request,
    decision: &Decision,
) -> Vec<Warning> {
    let mut found = Vec::new();
    if same_host(here, remote)
        && request.transports.shared_memory
        && decision.transport != Some(Transport::SharedMemory)
    {
        let cause = format!("{} is on this host, but its shared directory is another one", remote.hostname);
        found.push(warning(
            Code::SharedDirectoryDiffers,
            cause,
            "give both containers one directory: --ipc=host, or one volume for the shared directory",
        ));
    }
    let both = here.rails.iter().any(|rail| !rail.software) && !remote.rails.is_empty();
    if both
        && request.transports.rdma
        && !matches!(decision.transport, Some(Transport::Rdma | Transport::SharedMemory))
    {
        let cause = format!("none of our rails reaches one of {}", remote.hostname);
        found.push(warning(
            Code::NoCommonFabric,
            cause,
            "compare link layer and subnet of both: \
            kvasir doctor; connect the same rails to the same switches",
        ));
    }
    let nearest = decision.rails.iter().filter_map(|pair| pair.local.distance).min();
    if nearest == Some(Distance::Sys) && topology.numa.len() > 1 {
        found.push(far(request.source, topology));
    }
    let differ =
        decision.rails.iter().skip(1).find(|pair| !pair.local.shares_subnet(&decision.rails[0].local));
    if let Some(other) = differ {
        let cause =
            format!("{} and {} are in different subnets", decision.rails[0].local.name, other.local.name);
        found.push(warning(
            Code::RailsDiffer,
            cause,
            "nothing, when the peer's rails are cabled \
            alike; else put all rails of one fabric into one subnet",
        ));
    }
    found
}

fn far(memory: Memory, topology: &Topology) -> Warning {
    match memory {
        Memory::Gpu(address) => {
            let index = topology.gpus.iter().position(|gpu| gpu.address == address).unwrap_or(0);
            warning(
                Code::GpuFar,
                format!("gpu{index} ({address}) reaches a NIC only through the other socket"),
                "move a NIC to a slot of the GPU's socket, or place the work on a GPU near the NIC: \
                    CUDA_VISIBLE_DEVICES",
            )
        }
        Memory::Host { numa } => {
            let node = numa.map_or_else(|| "?".to_owned(), |node| node.to_string());
            let near = topology.rdma.iter().find_map(|device| device.numa_node.filter(|_| !device.software));
            let near = near.map_or_else(|| "N".to_owned(), |node| node.to_string());
            warning(
                Code::MemoryFar,
                format!("memory of NUMA node {node} has no NIC of its own"),
                format!(
                    "bind process and memory to the NIC's node: numactl --cpunodebind={near} --membind={near}"
                ),
            )
        }
    }
}
