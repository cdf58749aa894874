//! The real transports for the transfer benchmark.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};
use dataplane_fabric::Fabric;
use dataplane_memory::Slab;
use dataplane_shm::{ShmConfig, ShmFabric};
use dataplane_tcp::{TcpConfig, TcpFabric};
use dataplane_verbs::{Device, Library, VerbsConfig, VerbsError, VerbsFabric};

use crate::transfer::{ANY_ADDRESS, Rails, Unavailable};

/// Shared memory, TCP and RDMA of this machine.
pub(crate) struct MachineRails {
    devices: Vec<String>,
    gid_index: Option<u8>,
}

impl MachineRails {
    pub(crate) fn new(devices: &[String], gid_index: Option<u32>) -> Result<Self> {
        let gid_index = gid_index.map(u8::try_from).transpose().context("--gid-index")?;
        Ok(Self { devices: devices.to_vec(), gid_index })
    }

    fn verbs(&self, slab: &Arc<Slab>, listen: Option<SocketAddr>, rail: usize) -> Result<VerbsFabric> {
        let absent = |error: VerbsError| match error {
            VerbsError::Library { .. } | VerbsError::Symbol { .. } | VerbsError::NoDevice(_) => {
                anyhow::Error::new(Unavailable(error.to_string()))
            }
            other => other.into(),
        };
        let library = Library::load().map_err(absent)?;
        let names = Device::names(&library).map_err(absent)?;
        let name = match &self.devices[..] {
            [] => names.get(rail % names.len().max(1)),
            named => named.get(rail % named.len()),
        };
        let device = Device::open(&library, name.map(String::as_str)).map_err(absent)?;
        let config = VerbsConfig { gid_index: self.gid_index, ..VerbsConfig::default() };
        Ok(VerbsFabric::new(device, slab, listen, config)?)
    }
}

fn ip_and_port(listen: Option<&str>) -> Result<Option<SocketAddr>> {
    match listen {
        None => Ok(None),
        Some(ANY_ADDRESS) => Ok(Some(SocketAddr::from(([127, 0, 0, 1], 0)))),
        Some(address) => Ok(Some(address.parse().with_context(|| format!("'{address}' is not an ip:port"))?)),
    }
}

impl Rails for MachineRails {
    fn make(
        &self,
        transport: &str,
        slab: Arc<Slab>,
        listen: Option<&str>,
        rail: usize,
    ) -> Result<(Box<dyn Fabric>, String)> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let bound = |address: Option<SocketAddr>| address.map(|bound| bound.to_string()).unwrap_or_default();
        match transport {
            "shm" => {
                let number = NUMBER.fetch_add(1, Ordering::Relaxed);
                let path = match listen {
                    // An abstract socket leaves no file behind.
                    Some(ANY_ADDRESS) => Some(format!("@kvasir-bench-{}-{number}", std::process::id())),
                    other => other.map(str::to_owned),
                };
                let fabric = ShmFabric::new(slab, path.as_deref(), ShmConfig::default())?;
                Ok((Box::new(fabric), path.unwrap_or_default()))
            }
            "tcp" => {
                let fabric = TcpFabric::new(slab, ip_and_port(listen)?, TcpConfig::default())?;
                let address = bound(fabric.listening_on());
                Ok((Box::new(fabric), address))
            }
            "rdma" => {
                let fabric = self.verbs(&slab, ip_and_port(listen)?, rail)?;
                let address = bound(fabric.listening_on());
                Ok((Box::new(fabric), address))
            }
            other => bail!("no transport '{other}'"),
        }
    }
}
