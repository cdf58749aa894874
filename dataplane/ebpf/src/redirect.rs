//! Loads `bpf/redirect.bpf.c`: short messages between local sockets skip the TCP stack.
//!
//! Differences for a program on a listed port: `splice(2)` from such a socket sees only the TCP stream, a
//! read with `MSG_WAITALL` may return early, `MSG_OOB` bytes arrive in line, `MSG_ZEROCOPY` sends no
//! notification, and netfilter, tcpdump and byte counters see the handshake and the long messages only.
//! Readers by `read`, `recv`, epoll or io_uring see no difference.
//!
//! After a detach, tracked sockets keep their program until they close (each holds a reference), so that no
//! byte in flight is lost. Dropping [`Redirect`] switches the program to the stream as soon as the peer's
//! queue is empty; after a crash the program redirects as before.

use std::fs::File;

use aya::Ebpf;
use aya::maps::{Array, MapData, PerCpuArray, SockHash};
use aya::programs::{CgroupAttachMode, SkMsg, SockOps};

use crate::config::RedirectConfig;
use crate::error::EbpfError;
use crate::layout::{Endpoint, RedirectSettings};
use crate::load::{self, refused};
use crate::{host, own_cgroup};

const FEATURE: &str = "the socket redirect";

/// The attached programs; dropping it detaches them.
pub struct Redirect {
    settings: Array<MapData, RedirectSettings>,
    counters: PerCpuArray<MapData, u64>,
    sockets: SockHash<MapData, Endpoint>,
    current: RedirectSettings,
    _ebpf: Ebpf,
}

/// Counts of events since the attachment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RedirectCounters {
    /// Messages that skipped the TCP stack.
    pub redirected_messages: u64,
    /// Bytes of these messages.
    pub redirected_bytes: u64,
    /// Messages that took the stream because they were long, in a direction of bulk, or the redirect was off.
    pub passed_large: u64,
    /// Messages that took the stream because the other socket is not in the map.
    pub passed_no_peer: u64,
    /// Messages that took the stream because earlier bytes of the stream were still unread.
    pub passed_unread: u64,
    /// Messages refused with `EACCES`: too many unread bytes.
    pub refused: u64,
    /// Sockets that entered the map.
    pub sockets_added: u64,
    /// Sockets that were not added because the map was full.
    pub sockets_not_added: u64,
}

impl Redirect {
    /// Attaches to the cgroup; connections made from now on are tracked.
    ///
    /// # Errors
    ///
    /// [`EbpfError`]: not built, capabilities, BTF, cgroup, a value out of range, or the kernel refused.
    pub fn attach(config: &RedirectConfig) -> Result<Self, EbpfError> {
        config.check()?;
        let (mut ebpf, cgroup) = prepare(config)?;
        let current = RedirectSettings {
            enabled: 1,
            message_bytes_max: config.message_bytes_max,
            unread_bytes_max: config.unread_bytes_max,
        };
        load::set_ports(&mut ebpf, &config.ports)?;
        let mut redirect = Self {
            settings: load::map(&mut ebpf, "settings")?,
            counters: load::map(&mut ebpf, "counters")?,
            sockets: load::map(&mut ebpf, "sockets")?,
            current,
            _ebpf: ebpf,
        };
        redirect.write_settings()?;
        let ebpf = &mut redirect._ebpf;
        // The verdict program first: a socket gets the program that is in the map when the socket is added.
        let forward: &mut SkMsg = load::program(ebpf, "forward", SkMsg::load)?;
        forward
            .attach(redirect.sockets.fd())
            .map_err(|error| refused("attaching forward".to_owned(), &error))?;
        let track: &mut SockOps = load::program(ebpf, "track", SockOps::load)?;
        // A cgroup link has no mode: it always allows programs of other owners.
        track
            .attach(cgroup, CgroupAttachMode::Single)
            .map_err(|error| refused("attaching track to the cgroup".to_owned(), &error))?;
        Ok(redirect)
    }

    /// Loads the programs and attaches none, to find out whether [`Redirect::attach`] would work.
    pub(crate) fn check() -> Result<(), EbpfError> {
        let (mut ebpf, _) = prepare(&RedirectConfig::default())?;
        load::program(&mut ebpf, "forward", SkMsg::load)?;
        load::program(&mut ebpf, "track", SockOps::load)?;
        Ok(())
    }

    /// Returns the counters, summed over CPUs.
    ///
    /// # Errors
    ///
    /// [`EbpfError::Refused`] where a map cannot be read.
    pub fn counters(&self) -> Result<RedirectCounters, EbpfError> {
        let counter = |index| load::counter(&self.counters, index);
        Ok(RedirectCounters {
            redirected_messages: counter(0)?,
            redirected_bytes: counter(1)?,
            passed_large: counter(2)?,
            passed_no_peer: counter(3)?,
            passed_unread: counter(4)?,
            refused: counter(5)?,
            sockets_added: counter(6)?,
            sockets_not_added: counter(7)?,
        })
    }

    /// Returns the number of sockets in the map.
    #[must_use]
    pub fn sockets(&self) -> usize {
        self.sockets.keys().count()
    }

    /// Switches the redirect off or on without detaching. While it is off, no socket enters the map, and a
    /// tracked socket uses the stream as soon as its peer has read the waiting bytes.
    ///
    /// # Errors
    ///
    /// [`EbpfError::Refused`] where the map cannot be written.
    pub fn set_enabled(&mut self, enabled: bool) -> Result<(), EbpfError> {
        self.current.enabled = u32::from(enabled);
        self.write_settings()
    }

    fn write_settings(&mut self) -> Result<(), EbpfError> {
        self.settings.set(0, self.current, 0).map_err(|error| refused("the settings".to_owned(), &error))
    }
}

impl Drop for Redirect {
    fn drop(&mut self) {
        // After a failure the tracked sockets stay redirected, which is correct as well.
        let _ = self.set_enabled(false);
    }
}

fn prepare(config: &RedirectConfig) -> Result<(Ebpf, File), EbpfError> {
    let object = load::REDIRECT;
    object.map_err(EbpfError::NotBuilt)?;
    host::check_capabilities(FEATURE, host::NETWORK_AND_STRUCTURES)?;
    host::check_btf(FEATURE)?;
    let path = config.cgroup.clone().map_or_else(own_cgroup, Ok)?;
    host::check_cgroup(&path)?;
    let cgroup = File::open(&path)
        .map_err(|error| EbpfError::NotACgroup { path: path.clone(), reason: error.to_string() })?;
    let sizes = [("sockets", config.sockets_max), ("endpoints", config.sockets_max)];
    Ok((load::load("redirect", object, &sizes)?, cgroup))
}
