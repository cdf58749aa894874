//! Engines on this machine: the network namespace and the processes behind the address that gateways know.
//!
//! All data comes from `/proc`. A pod has its own network namespace, with its address in it; an engine on
//! loopback is in this process's namespace. The listening process and all its descendants belong to the
//! engine: vLLM's and SGLang's schedulers and workers are children of their servers.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::MetadataExt;

use dataplane_ebpf::WatchedEngine;

/// `TCP_LISTEN` in `/proc/net/tcp`.
const LISTEN: &str = "0A";

#[derive(Debug)]
struct Process {
    id: u32,
    parent: u32,
    netns: u32,
}

/// Snapshot of the processes of this machine.
#[derive(Debug)]
pub(crate) struct Machine {
    processes: Vec<Process>,
    own_netns: u32,
}

impl Machine {
    /// Reads `/proc`. Processes that this process may not inspect are omitted.
    pub(crate) fn read() -> Self {
        let netns =
            |process: &str| fs::metadata(format!("/proc/{process}/ns/net")).map(|found| found.ino() as u32);
        let mut processes = Vec::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(id) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            if let (Some(parent), Ok(netns)) = (parent_of(&stat), netns(&id.to_string())) {
                processes.push(Process { id, parent, netns });
            }
        }
        Self { processes, own_netns: netns("self").unwrap_or(0) }
    }

    /// Returns the engine that listens at this address, if it is on this machine.
    pub(crate) fn engine(&self, host: IpAddr, port: u16) -> Option<WatchedEngine> {
        let mut seen = HashSet::new();
        // One process of each namespace is enough to read its network state.
        let namespaces = self.processes.iter().filter(|process| seen.insert(process.netns));
        namespaces.into_iter().find_map(|process| {
            let is_there = match host.is_loopback() {
                true => process.netns == self.own_netns,
                false => has_address(process.id, host),
            };
            let listener = if is_there { self.listener(process, port) } else { None }?;
            Some(WatchedEngine { netns: process.netns, port, processes: self.with_children(listener) })
        })
    }

    /// Returns the process that listens on the port in the network namespace of `of`.
    fn listener(&self, of: &Process, port: u16) -> Option<u32> {
        let tables = ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/{}/net/{table}", of.id)));
        let inodes: HashSet<String> = tables
            .iter()
            .flatten()
            .flat_map(|table| listening(table, port))
            .map(|inode| format!("socket:[{inode}]"))
            .collect();
        if inodes.is_empty() {
            return None;
        }
        let holds = |process: &&Process| {
            let files = fs::read_dir(format!("/proc/{}/fd", process.id)).into_iter().flatten().flatten();
            files.into_iter().any(|file| {
                fs::read_link(file.path())
                    .is_ok_and(|link| link.to_str().is_some_and(|link| inodes.contains(link)))
            })
        };
        // After a fork several processes hold the socket: the holder whose parent is not a holder is the
        // server.
        let holders: Vec<&Process> =
            self.processes.iter().filter(|process| process.netns == of.netns).filter(holds).collect();
        let ids: HashSet<u32> = holders.iter().map(|process| process.id).collect();
        holders.iter().find(|process| !ids.contains(&process.parent)).map(|process| process.id)
    }

    fn with_children(&self, root: u32) -> Vec<u32> {
        let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
        for process in &self.processes {
            children.entry(process.parent).or_default().push(process.id);
        }
        let mut all = vec![root];
        let mut at = 0;
        while at < all.len() {
            all.extend(children.get(&all[at]).into_iter().flatten());
            at += 1;
        }
        all
    }
}

/// Returns the parent's id from a `/proc/PID/stat`; the command name in it may contain any character.
fn parent_of(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Returns the inodes of the listening sockets on the port in a `/proc/net/tcp` or `tcp6`.
fn listening(table: &str, port: u16) -> Vec<u64> {
    let line = |line: &str| -> Option<u64> {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (_, local) = words.next()?.rsplit_once(':')?;
        let (_remote, state) = (words.next()?, words.next()?);
        let is_it = state == LISTEN && u16::from_str_radix(local, 16) == Ok(port);
        if is_it { words.nth(5)?.parse().ok() } else { None }
    };
    table.lines().filter_map(line).collect()
}

/// Whether the network namespace of a process has this address.
fn has_address(process: u32, address: IpAddr) -> bool {
    let read = |file: &str| fs::read_to_string(format!("/proc/{process}/net/{file}")).unwrap_or_default();
    match address {
        IpAddr::V4(address) => local_v4(&read("fib_trie")).contains(&address),
        IpAddr::V6(address) => local_v6(&read("if_inet6")).contains(&address),
    }
}

/// Returns the addresses of a namespace's own interfaces from its `fib_trie`.
fn local_v4(table: &str) -> HashSet<Ipv4Addr> {
    let (mut all, mut last) = (HashSet::new(), None::<Ipv4Addr>);
    for line in table.lines() {
        let line = line.trim();
        match line.strip_prefix("|-- ") {
            Some(address) => last = address.parse().ok(),
            None if line == "/32 host LOCAL" => all.extend(last),
            None => {}
        }
    }
    all
}

/// Returns the addresses of a namespace's own interfaces from its `if_inet6`.
fn local_v6(table: &str) -> HashSet<Ipv6Addr> {
    let address = |line: &str| u128::from_str_radix(line.split_ascii_whitespace().next()?, 16).ok();
    table.lines().filter_map(address).map(Ipv6Addr::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_proc_are_read() {
        let tcp = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0\n   \
                   1: 0100007F:1F40 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 30 10 -1\n   \
                   2: 00000000:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0 100 0 0 10 0\n";
        assert_eq!(
            (listening(tcp, 8000), listening(tcp, 8001), listening(tcp, 1)),
            (vec![4711], vec![4713], vec![])
        );
        let tcp6 = "   0: 00000000000000000000000000000000:1F40 00000000000000000000000000000000:0000 0A 00000000:00000000 \
                    00:00000000 00000000     0        0 99 1 0 100 0 0 10 0\n";
        assert_eq!(listening(tcp6, 8000), [99]);
        assert_eq!(parent_of("12 (a) b (c) S 7 12 12 0"), Some(7));
        assert_eq!(parent_of("nonsense"), None);
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.0.0.0\n        /24 link UNICAST\n     |-- 10.0.0.7\n        \
                    /32 host LOCAL\n     |-- 10.0.0.255\n        /32 link BROADCAST\n";
        assert_eq!(local_v4(trie), HashSet::from([Ipv4Addr::new(10, 0, 0, 7)]));
        let inet6 = "fd000000000000000000000000000001 02 40 00 80     eth0\n";
        assert_eq!(local_v6(inet6), HashSet::from(["fd00::1".parse().expect("an address")]));
    }

    #[test]
    fn a_listener_of_this_process_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let machine = Machine::read();
        let found = machine.engine(Ipv4Addr::LOCALHOST.into(), port).expect("it is found");
        assert!(found.processes.contains(&std::process::id()), "{found:?}");
        assert_eq!((found.port, found.netns), (port, machine.own_netns));
        drop(listener);
        assert_eq!(Machine::read().engine(Ipv4Addr::LOCALHOST.into(), port), None);
        assert_eq!(
            machine.engine(Ipv4Addr::new(203, 0, 113, 1).into(), port),
            None,
            "the address of no interface"
        );
    }
}
