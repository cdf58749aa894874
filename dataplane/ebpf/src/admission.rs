//! Loads `bpf/admission.bpf.c`: filters and limits new connections to the appliance's ports.

use std::os::fd::{AsFd, OwnedFd};

use aya::Ebpf;
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, MapData, PerCpuArray};
use aya::programs::{TestRun, TestRunOptions, Xdp};

use crate::bucket::spans_ns;
use crate::config::{AdmissionConfig, check_allow, check_overload};
use crate::error::EbpfError;
use crate::layout::AdmissionSettings;
use crate::load::{self, refused};
use crate::prefix::Prefix;
use crate::{host, link};

const FEATURE: &str = "XDP admission";
const PROGRAM: &str = "admit";

/// The kernel's verdict XDP_PASS.
const PASS: u32 = 2;

/// The attached program. Dropping it detaches it from every interface.
pub struct Admission {
    ebpf: Ebpf,
    settings: Array<MapData, AdmissionSettings>,
    counters: PerCpuArray<MapData, u64>,
    allow_v4: LpmTrie<MapData, [u8; 4], u32>,
    allow_v6: LpmTrie<MapData, [u8; 16], u32>,
    allow: Vec<Prefix>,
    current: AdmissionSettings,
    attached: Vec<Attached>,
}

/// An interface that the program is attached to.
#[derive(Debug)]
pub struct Attached {
    /// Name of the interface.
    pub interface: String,
    /// Whether the program runs in the driver, before the kernel allocates a buffer. Otherwise it runs after
    /// the allocation, which every interface supports.
    pub native: bool,
    _link: OwnedFd,
}

/// Packets by verdict and reason since the attachment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmissionCounters {
    /// Passed: not TCP, or to another port.
    pub passed_other: u64,
    /// Passed: to a listed port, on an existing connection.
    pub passed_established: u64,
    /// Passed: new connections.
    pub passed_connection: u64,
    /// Passed: later fragments, which carry no port.
    pub passed_fragment: u64,
    /// Passed: more IPv6 extension headers than the program follows.
    pub passed_extension: u64,
    /// Passed: truncated or contradictory headers, which the kernel drops.
    pub passed_malformed: u64,
    /// Dropped: the source is not in the allow-list.
    pub dropped_prefix: u64,
    /// Dropped: new connections, by the overload level.
    pub dropped_overload: u64,
    /// Dropped: new connections above the rate of their source.
    pub dropped_source_rate: u64,
    /// Dropped: new connections above the rate of all sources.
    pub dropped_total_rate: u64,
}

impl Admission {
    /// Loads the program and attaches it to each interface, in the driver where that is possible.
    ///
    /// # Errors
    ///
    /// [`EbpfError`]: not built, capabilities, a value out of range, no such interface, one with another XDP program, or
    /// the kernel refused. Then nothing stays attached.
    pub fn attach(config: &AdmissionConfig) -> Result<Self, EbpfError> {
        let mut admission = Self::load(config)?;
        for interface in &config.interfaces {
            admission.attach_to(interface)?;
        }
        Ok(admission)
    }

    /// Loads the program without attaching it, for [`Admission::passes`] and [`Admission::attach_to`].
    ///
    /// # Errors
    ///
    /// The errors of [`Admission::attach`] that do not concern interfaces.
    pub fn load(config: &AdmissionConfig) -> Result<Self, EbpfError> {
        config.check()?;
        load::ADMISSION.map_err(EbpfError::NotBuilt)?;
        host::check_capabilities(FEATURE, host::NETWORK)?;
        let mut ebpf = load::load("admission", load::ADMISSION, &[("sources", config.sources_max)])?;
        load::set_ports(&mut ebpf, &config.ports)?;
        let (source_interval_ns, source_burst_ns) =
            spans_ns(config.syn_rate_per_source, config.syn_burst_per_source);
        let (total_interval_ns, total_burst_ns) = spans_ns(config.syn_rate, config.syn_burst);
        let mut admission = Self {
            settings: load::map(&mut ebpf, "settings")?,
            counters: load::map(&mut ebpf, "counters")?,
            allow_v4: load::map(&mut ebpf, "allow_v4")?,
            allow_v6: load::map(&mut ebpf, "allow_v6")?,
            ebpf,
            allow: Vec::new(),
            current: AdmissionSettings {
                source_interval_ns,
                source_burst_ns,
                total_interval_ns,
                total_burst_ns,
                allow_list: 0,
                overload_percent: config.overload_percent,
            },
            attached: Vec::new(),
        };
        admission.set_allow(&config.allow)?;
        load::program(&mut admission.ebpf, PROGRAM, Xdp::load)?;
        Ok(admission)
    }

    /// Attaches the program to one more interface of the calling thread's network namespace.
    ///
    /// # Errors
    ///
    /// [`EbpfError::NoInterface`], [`EbpfError::InterfaceBusy`], or [`EbpfError::Refused`] with the errno.
    pub fn attach_to(&mut self, interface: &str) -> Result<&Attached, EbpfError> {
        let index = interface_index(interface).ok_or_else(|| EbpfError::NoInterface(interface.to_owned()))?;
        let program: &Xdp =
            self.ebpf.program(PROGRAM).and_then(|program| program.try_into().ok()).ok_or_else(unloaded)?;
        let program = program.fd().map_err(|error| refused(PROGRAM.to_owned(), &error))?.as_fd();
        let (link, native) = match link::attach_xdp(program, index, link::NATIVE) {
            Ok(link) => (Ok(link), true),
            // EBUSY means in either mode that the interface is occupied; other errors may come from the
            // driver.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => (Err(error), true),
            Err(_) => (link::attach_xdp(program, index, link::GENERIC), false),
        };
        let link = link.map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => EbpfError::InterfaceBusy(interface.to_owned()),
            _ => refused(format!("XDP on {interface}"), &error),
        })?;
        self.attached.push(Attached { interface: interface.to_owned(), native, _link: link });
        self.attached.last().ok_or_else(unloaded)
    }

    /// Returns the interfaces that the program is attached to, with the mode of each.
    #[must_use]
    pub fn attached(&self) -> &[Attached] {
        &self.attached
    }

    /// Replaces the allow-list; an empty list admits all sources. During the change, a source that is in both
    /// lists stays allowed.
    ///
    /// # Errors
    ///
    /// [`EbpfError::Configuration`] where the list is too long, [`EbpfError::Refused`] where a map cannot be written.
    pub fn set_allow(&mut self, allow: &[Prefix]) -> Result<(), EbpfError> {
        check_allow(allow)?;
        if allow.is_empty() {
            self.current.allow_list = 0;
            self.write_settings()?;
        }
        // Old prefixes are removed first only if both lists together do not fit.
        let fits = check_allow(&[&self.allow, allow].concat()).is_ok();
        if !fits {
            self.remove_all_but(allow)?;
        }
        for prefix in allow {
            let bits = u32::from(prefix.bits());
            match prefix.address() {
                std::net::IpAddr::V4(address) => {
                    self.allow_v4.insert(&Key::new(bits, address.octets()), 1, 0)
                }
                std::net::IpAddr::V6(address) => {
                    self.allow_v6.insert(&Key::new(bits, address.octets()), 1, 0)
                }
            }
            .map_err(|error| refused(format!("allowing {prefix}"), &error))?;
        }
        self.remove_all_but(allow)?;
        self.allow = allow.to_vec();
        self.current.allow_list = u32::from(!allow.is_empty());
        self.write_settings()
    }

    /// Sets the share of new connections that are dropped, 0 to 100 %.
    ///
    /// # Errors
    ///
    /// [`EbpfError::Configuration`] above 100, [`EbpfError::Refused`] where the map cannot be written.
    pub fn set_overload(&mut self, percent: u32) -> Result<(), EbpfError> {
        check_overload(percent)?;
        self.current.overload_percent = percent;
        self.write_settings()
    }

    /// Returns the counters, summed over CPUs.
    ///
    /// # Errors
    ///
    /// [`EbpfError::Refused`] where a map cannot be read.
    pub fn counters(&self) -> Result<AdmissionCounters, EbpfError> {
        let counter = |index| load::counter(&self.counters, index);
        Ok(AdmissionCounters {
            passed_other: counter(0)?,
            passed_established: counter(1)?,
            passed_connection: counter(2)?,
            passed_fragment: counter(3)?,
            passed_extension: counter(4)?,
            passed_malformed: counter(5)?,
            dropped_prefix: counter(6)?,
            dropped_overload: counter(7)?,
            dropped_source_rate: counter(8)?,
            dropped_total_rate: counter(9)?,
        })
    }

    /// Runs the program on an Ethernet frame of at least 14 bytes, in the kernel but on no interface. Tokens
    /// and counters change as for a frame from the network.
    ///
    /// # Errors
    ///
    /// [`EbpfError::Refused`] where the kernel does not run it.
    pub fn passes(&self, frame: &[u8]) -> Result<bool, EbpfError> {
        let program: &Xdp =
            self.ebpf.program(PROGRAM).and_then(|program| program.try_into().ok()).ok_or_else(unloaded)?;
        let result = program
            .test_run(TestRunOptions { data_in: Some(frame), ..TestRunOptions::default() })
            .map_err(|error| refused("a dry run".to_owned(), &error))?;
        Ok(result.return_value == PASS)
    }

    fn remove_all_but(&mut self, kept: &[Prefix]) -> Result<(), EbpfError> {
        for prefix in std::mem::take(&mut self.allow) {
            if kept.contains(&prefix) {
                continue;
            }
            let bits = u32::from(prefix.bits());
            match prefix.address() {
                std::net::IpAddr::V4(address) => self.allow_v4.remove(&Key::new(bits, address.octets())),
                std::net::IpAddr::V6(address) => self.allow_v6.remove(&Key::new(bits, address.octets())),
            }
            .map_err(|error| refused(format!("disallowing {prefix}"), &error))?;
        }
        Ok(())
    }

    fn write_settings(&mut self) -> Result<(), EbpfError> {
        self.settings.set(0, self.current, 0).map_err(|error| refused("the settings".to_owned(), &error))
    }
}

fn unloaded() -> EbpfError {
    EbpfError::Refused { step: PROGRAM.to_owned(), reason: "it is not loaded".to_owned() }
}

/// Returns the index of an interface; also `None` for a name that no interface can have.
fn interface_index(name: &str) -> Option<u32> {
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None).ok()?;
    rustix::net::netdevice::name_to_index(socket, name).ok()
}
