//! `kvasir explain-path A B`: the path that bytes take between two endpoints, and the reason for it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use control_config::Settings;
use dataplane_rails::Transport;
use dataplane_topology::{NodeDescription, NodeRequirements, Place, Topology, Transports, render};

use crate::compose;

/// Two endpoints: `gpu0`, `0000:17:00.0`, `host`, `host:1` (a NUMA node), `mlx5_0`, or `node2:gpu0` on a
/// described node.
#[derive(Args)]
pub(crate) struct PathArgs {
    /// The configuration file. Without a file, the defaults apply.
    #[arg(long, env = "KVASIR_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Source endpoint, on this node.
    from: String,
    /// Destination endpoint.
    to: String,
    /// Description of another node: the output of `kvasir doctor --describe` there. May be given several
    /// times.
    #[arg(long = "node", value_name = "FILE")]
    nodes: Vec<PathBuf>,
    /// Also draw the machine with the chosen path, as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Round-trip time to a peer within a cluster.
const ROUND_TRIP: Duration = Duration::from_micros(200);

/// Reads the settings, or takes the defaults without a file.
pub(crate) fn settings(config: Option<&Path>) -> Result<Settings> {
    Ok(config.map(control_config::load).transpose()?.unwrap_or_default())
}

/// Reads the topology of this machine, with the identity of the socket folder that shared memory uses.
pub(crate) fn topology(settings: &Settings) -> Topology {
    let mut topology = Topology::read(Path::new("/"));
    let folder = compose::socket_folder(settings).display().to_string();
    topology.host.shared_directory_id = topology.host.directory_id(&folder);
    topology
}

/// Returns the requirements of a node with these settings on its links and memory.
pub(crate) fn needs(settings: &Settings) -> NodeRequirements {
    let slab_bytes = compose::slab_bytes(settings).unwrap_or(NodeRequirements::default().slab_bytes);
    NodeRequirements { slab_bytes, round_trip: ROUND_TRIP }
}

/// Returns the description of this node for other nodes.
pub(crate) fn describe(settings: &Settings) -> String {
    let tcp = settings.transfer.listen.ip();
    let is_reachable = !tcp.is_loopback() && !tcp.is_unspecified();
    let addresses = if is_reachable { vec![tcp.to_string()] } else { Vec::new() };
    NodeDescription::of(&topology(settings), addresses).encode()
}

pub(crate) fn run(args: &PathArgs) -> Result<ExitCode> {
    let settings = settings(args.config.as_deref())?;
    let mut others = Vec::new();
    for file in &args.nodes {
        let bytes = std::fs::read(file).with_context(|| format!("{}", file.display()))?;
        others.push(NodeDescription::parse(&bytes).with_context(|| format!("{}", file.display()))?);
    }
    let (from, to): (Place, Place) = (args.from.parse()?, args.to.parse()?);
    let has = |transport| compose::transports(&settings).contains(&transport);
    let transports = Transports {
        shared_memory: has(Transport::Shm),
        rdma: has(Transport::Rdma),
        tcp: has(Transport::Tcp),
    };
    let explained = render::explain(&topology(&settings), &others, &from, &to, transports, needs(&settings))?;
    print!("{}", explained.text);
    if let Some(file) = &args.svg {
        std::fs::write(file, explained.svg).with_context(|| format!("{}", file.display()))?;
        println!("drawn in {}", file.display());
    }
    Ok(ExitCode::SUCCESS)
}
