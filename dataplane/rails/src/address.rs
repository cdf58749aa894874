//! The addresses at which peers reach a process.

use std::net::SocketAddr;

/// Addresses at which the transports of a process listen.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Addresses {
    /// Host identity, equal for all processes that share memory: the machine's boot id, `/`, and the shared
    /// folder.
    pub host: String,
    /// Path of the shared-memory socket; `None` if that transport is off.
    pub shm: Option<String>,
    /// Path of the socket of shared device memory; `None` if that transport is off.
    pub cuda_ipc: Option<String>,
    /// `ip:port` of the TCP transport; `None` if it is off.
    pub tcp: Option<String>,
    /// `ip:port` at which peers connect to each RDMA rail, best first.
    pub rdma: Vec<String>,
}

impl Addresses {
    /// Returns the addresses in the notation that peers connect with, best first. Loopback addresses are
    /// included only if there are no others, because they mean another host elsewhere. Processes of this
    /// host take the first address that they can use. If device memory is shared, every transport is named:
    /// memory that cannot be shared is reached by a card, or staged.
    #[must_use]
    pub fn notation(&self) -> Vec<String> {
        let rails = self.rdma.iter().map(|address| ("rdma", address));
        let tcp = self.tcp.iter().map(|address| ("tcp", address));
        let network: Vec<(&str, &String)> = rails.chain(tcp).collect();
        let is_far = network.iter().any(|(_, address)| !is_loopback(address));
        let network: Vec<String> = network
            .into_iter()
            .filter(|(_, address)| !is_far || !is_loopback(address))
            .map(|(kind, address)| format!("{kind}:{address}"))
            .collect();
        let shm = self.shm.iter().map(|path| format!("shm:{path}"));
        let local = match &self.cuda_ipc {
            None => shm.collect(),
            Some(path) => {
                let ways =
                    std::iter::once(format!("cuda_ipc:{path}")).chain(shm).chain(network.iter().cloned());
                vec![ways.collect::<Vec<String>>().join(",")]
            }
        };
        local.into_iter().chain((!network.is_empty()).then(|| network.join(","))).collect()
    }
}

/// Whether `ip:port` is a loopback address, which no other host can reach.
#[must_use]
pub fn is_loopback(address: &str) -> bool {
    address.parse::<SocketAddr>().is_ok_and(|address| address.ip().to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(tcp: Option<&str>, rdma: &[&str]) -> Addresses {
        let rdma = rdma.iter().map(|&address| address.to_owned()).collect();
        Addresses { host: "h".to_owned(), tcp: tcp.map(str::to_owned), rdma, ..Addresses::default() }
    }

    #[test]
    fn other_hosts_are_told_of_no_loopback_rail() {
        let (far, near) = ("10.0.0.2:7400", "127.0.0.1:18500");
        for (tcp, rdma, expected) in [
            (Some(far), vec![near], "tcp:10.0.0.2:7400"),
            (
                Some(far),
                vec!["10.0.1.2:1", "10.0.2.2:1"],
                "rdma:10.0.1.2:1,rdma:10.0.2.2:1,tcp:10.0.0.2:7400",
            ),
            (Some("127.0.0.1:7400"), vec![near], "rdma:127.0.0.1:18500,tcp:127.0.0.1:7400"),
            (None, vec![near], "rdma:127.0.0.1:18500"),
        ] {
            assert_eq!(addresses(tcp, &rdma).notation(), [expected]);
        }
        assert!(addresses(None, &[]).notation().is_empty());
        let both = Addresses { shm: Some("/x".to_owned()), ..addresses(Some(far), &[]) };
        assert_eq!(both.notation(), ["shm:/x", "tcp:10.0.0.2:7400"]);
        let shared = Addresses { cuda_ipc: Some("/x".to_owned()), ..addresses(None, &["10.0.1.2:1"]) };
        assert_eq!(shared.notation(), ["cuda_ipc:/x,rdma:10.0.1.2:1", "rdma:10.0.1.2:1"]);
        let every = Addresses { shm: Some("/y".to_owned()), tcp: Some(far.to_owned()), ..shared };
        let network = "rdma:10.0.1.2:1,tcp:10.0.0.2:7400";
        assert_eq!(every.notation(), [&format!("cuda_ipc:/x,shm:/y,{network}"), network]);
        let alone = Addresses { cuda_ipc: Some("/x".to_owned()), ..addresses(None, &[]) };
        assert_eq!(alone.notation(), ["cuda_ipc:/x"]);
    }
}
