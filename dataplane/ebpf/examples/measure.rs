//! Measures the benefit of the programs on this machine: each pair of figures side by side in one run, three
//! times.
//!
//! `measure redirect` compares round trips over loopback with and without the redirect. `measure flood` sends SYNs
//! from one network namespace at a server in another, with and without admission, while a client in a third one
//! keeps asking. Needs root; leaves nothing behind.

#[path = "../tests/lab/mod.rs"]
mod lab;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dataplane_ebpf::{Admission, AdmissionConfig, AdmissionCounters, Redirect, RedirectConfig};
use lab::{Cgroup, Namespaces, VETH, within};

const REPEATS: usize = 3;
const ROUND_TRIPS: usize = 30_000;
const WARM_UP: usize = 3_000;
const PORT: u16 = 8000;
const FLOOD: Duration = Duration::from_secs(3);
const FLOOD_PACKETS_MAX: u64 = 3_000_000;

fn main() {
    let what = std::env::args().nth(1).unwrap_or_default();
    if what.is_empty() || what == "redirect" {
        redirect();
    }
    if what.is_empty() || what == "flood" {
        flood();
    }
}

fn redirect() {
    let Some(group) = Cgroup::enter() else { return };
    println!("round trips over loopback TCP, two threads: p50 p99, CPU time of both ends per round trip");
    for bytes in [64, 4096] {
        for repeat in 1..=REPEATS {
            let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is there");
            let off = round_trips(&listener, bytes);
            let ports = vec![listener.local_addr().expect("it is bound").port()];
            let config =
                RedirectConfig { cgroup: Some(group.path.clone()), ports, ..RedirectConfig::default() };
            let Some(redirect) = lab::or_skip(Redirect::attach(&config)) else { return };
            let on = round_trips(&listener, bytes);
            let redirected = redirect.counters().expect("the maps are there").redirected_messages;
            println!(
                "{bytes:>5} B #{repeat}: off {:.2} {:.2} us, {:.2} us CPU | on {:.2} {:.2} us, {:.2} us CPU | on/off p50 {:.2} p99 {:.2} CPU {:.2} | redirected {redirected}",
                off.p50,
                off.p99,
                off.cpu,
                on.p50,
                on.p99,
                on.cpu,
                on.p50 / off.p50,
                on.p99 / off.p99,
                on.cpu / off.cpu,
            );
        }
    }
}

struct Trips {
    p50: f64,
    p99: f64,
    cpu: f64,
}

fn round_trips(listener: &TcpListener, bytes: usize) -> Trips {
    let mut client = TcpStream::connect(listener.local_addr().expect("it is bound")).expect("it listens");
    let (mut server, _) = listener.accept().expect("a client waits");
    client.set_nodelay(true).expect("it can be set");
    server.set_nodelay(true).expect("it can be set");
    let echo = std::thread::spawn(move || {
        let mut buffer = vec![0; bytes];
        while server.read_exact(&mut buffer).is_ok() && server.write_all(&buffer).is_ok() {}
    });
    let mut buffer = vec![3; bytes];
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    let mut cpu = Duration::ZERO;
    for number in 0..WARM_UP + ROUND_TRIPS {
        if number == WARM_UP {
            times.clear();
            cpu = cpu_time();
        }
        let started = Instant::now();
        client.write_all(&buffer).expect("the server is there");
        client.read_exact(&mut buffer).expect("the server answers");
        times.push(started.elapsed());
    }
    let cpu = cpu_time().saturating_sub(cpu);
    drop(client);
    echo.join().expect("the server ends with its client");
    times.sort_unstable();
    let at = |share: f64| times[(times.len() as f64 * share) as usize].as_secs_f64() * 1e6;
    Trips { p50: at(0.5), p99: at(0.99), cpu: cpu.as_secs_f64() * 1e6 / ROUND_TRIPS as f64 }
}

fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

fn flood() {
    let Some(spaces) = Namespaces::new() else { return };
    let client = lab::unique("c");
    let _client = set_up_client(&spaces.left, &client);
    println!(
        "SYN flood from sources outside of the allow-list for {FLOOD:?} (at most {FLOOD_PACKETS_MAX} packets), server \
         with a backlog of 128; a client in another namespace connects, asks, reads, closes"
    );
    for cookies in ["1", "0"] {
        lab::run(&[
            "ip",
            "netns",
            "exec",
            &spaces.left,
            "sysctl",
            "-qw",
            &format!("net.ipv4.tcp_syncookies={cookies}"),
        ])
        .expect("the namespace is ours");
        println!("tcp_syncookies={cookies}");
        let server = Server::start(&spaces.left);
        let quiet = ask(&client, Duration::from_secs(1));
        drop(server);
        println!("  no flood:             {quiet}");
        for repeat in 1..=REPEATS {
            for with in [false, true] {
                // A new server each time, with an empty backlog.
                let _server = Server::start(&spaces.left);
                let admission = with.then(|| admit(&spaces.left));
                let name = if with { "admission" } else { "kernel   " };
                let stop = Arc::new(AtomicBool::new(false));
                let flooder = {
                    let (right, stop) = (spaces.right.clone(), Arc::clone(&stop));
                    std::thread::spawn(move || within(&right, move || send_syns(&stop)))
                };
                let asked = ask(&client, FLOOD);
                stop.store(true, Ordering::Relaxed);
                let (sent, time) = flooder.join().expect("the sender ends");
                let dropped = admission.map_or_else(AdmissionCounters::default, |admission| {
                    admission.counters().expect("the maps are there")
                });
                println!(
                    "  #{repeat} {name}: sent {:.0} kpps, dropped by XDP {:.0} kpps | {asked}",
                    sent as f64 / time.as_secs_f64() / 1e3,
                    dropped.dropped_prefix as f64 / time.as_secs_f64() / 1e3,
                );
            }
        }
    }
}

/// A network namespace for the client, deleted on drop.
struct Client(String);

impl Drop for Client {
    fn drop(&mut self) {
        let _ = lab::run(&["ip", "netns", "del", &self.0]);
    }
}

fn set_up_client(left: &str, client: &str) -> Client {
    let guard = Client(client.to_owned());
    for words in [
        format!("ip netns add {client}"),
        format!("ip -n {left} link add veth1 type veth peer name {VETH} netns {client}"),
        format!("ip -n {left} link set {VETH} address 02:00:00:00:00:01"),
        format!("ip -n {left} addr add 10.98.0.1/24 dev veth1"),
        format!("ip -n {left} link set veth1 up"),
        format!("ip -n {client} addr add 10.98.0.2/24 dev {VETH}"),
        format!("ip -n {client} link set {VETH} up"),
        // Answers to the flood need a route, or the kernel would drop the SYNs for lack of one.
        format!("ip -n {left} route add default via 10.99.0.2 dev {VETH}"),
        format!(
            "ip netns exec {left} sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.{VETH}.rp_filter=0"
        ),
        format!("ip netns exec {left} sysctl -qw net.core.somaxconn=128 net.ipv4.tcp_max_syn_backlog=128"),
        // The last quarter of the backlog is reserved for clients that the kernel remembers; a new client is
        // not one.
        format!("ip netns exec {left} sysctl -qw net.ipv4.tcp_no_metrics_save=1"),
    ] {
        lab::run(&words.split(' ').collect::<Vec<_>>()).expect("the namespaces are ours");
    }
    guard
}

/// A server that answers one client after the other until it is dropped.
struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    fn start(left: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let listener = within(left, || TcpListener::bind(("0.0.0.0", PORT)).expect("the port is free"));
        listener.set_nonblocking(true).expect("it can be set");
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let Ok((mut stream, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_micros(50));
                    continue;
                };
                let mut question = [0; 64];
                let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
                if stream.read_exact(&mut question).is_ok() {
                    let _ = stream.write_all(&[b'.'; 256]);
                }
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn admit(left: &str) -> Admission {
    within(left, || {
        let config = AdmissionConfig {
            interfaces: vec![VETH.to_owned(), "veth1".to_owned()],
            ports: vec![PORT],
            allow: vec!["10.98.0.0/24".parse().expect("it is a prefix")],
            ..AdmissionConfig::default()
        };
        Admission::attach(&config).expect("a veth takes it")
    })
}

struct Asked {
    answered: usize,
    tried: usize,
    p50_ms: f64,
    p99_ms: f64,
}

impl std::fmt::Display for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { answered, tried, p50_ms, p99_ms } = self;
        let share = *answered as f64 * 100.0 / *tried as f64;
        write!(
            f,
            "client {answered} of {tried} answered ({share:.1} %), p50 {p50_ms:.2} ms, p99 {p99_ms:.2} ms"
        )
    }
}

fn ask(client: &str, during: Duration) -> Asked {
    within(client, move || {
        let address: SocketAddr = format!("10.98.0.1:{PORT}").parse().expect("it is an address");
        let limit = Duration::from_secs(1);
        let mut times = Vec::new();
        let mut tried = 0;
        let started = Instant::now();
        while started.elapsed() < during {
            let asked = Instant::now();
            tried += 1;
            let answered = TcpStream::connect_timeout(&address, limit).and_then(|mut stream| {
                stream.set_read_timeout(Some(limit))?;
                stream.write_all(&[b'?'; 64])?;
                stream.read_exact(&mut [0; 256])
            });
            if answered.is_ok() {
                times.push(asked.elapsed());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        times.sort_unstable();
        let at = |share: f64| {
            times.get((times.len() as f64 * share) as usize).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
        };
        Asked { answered: times.len(), tried, p50_ms: at(0.5), p99_ms: at(0.99) }
    })
}

/// Sends SYNs with correct checksums from random addresses of 198.18.0.0/15 (RFC 2544) until `stop` is set.
fn send_syns(stop: &AtomicBool) -> (u64, Duration) {
    let mut random = lab::Random(0x1234_5678_9abc_def1);
    let socket = packet_socket();
    let started = Instant::now();
    let mut sent = 0;
    let mut frame = [0u8; 54];
    frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14..26].copy_from_slice(&[0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0]);
    frame[30..34].copy_from_slice(&[10, 99, 0, 1]);
    frame[36..38].copy_from_slice(&PORT.to_be_bytes());
    frame[46..50].copy_from_slice(&[5 << 4, 0x02, 0xff, 0xff]);
    while !stop.load(Ordering::Relaxed) && sent < FLOOD_PACKETS_MAX && started.elapsed() < FLOOD * 2 {
        let word = random.next().to_le_bytes();
        frame[26..30].copy_from_slice(&[198, 18 | word[0] & 1, word[1], word[2]]);
        frame[34..36].copy_from_slice(&[word[3] | 0x80, word[4]]);
        frame[38..42].copy_from_slice(&word[4..]);
        let ip = checksum(&frame[14..34], 24 - 14, 0);
        frame[24..26].copy_from_slice(&ip);
        // The pseudo header: addresses, protocol 6, 20 bytes.
        let pseudo =
            frame[26..34].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum::<u32>()
                + 26;
        let tcp = checksum(&frame[34..54], 50 - 34, pseudo);
        frame[50..52].copy_from_slice(&tcp);
        if rustix::net::send(&socket, &frame, rustix::net::SendFlags::empty()).is_ok() {
            sent += 1;
        }
    }
    (sent, started.elapsed())
}

/// The Internet checksum over `bytes`, with the field at `field` taken as zero.
fn checksum(bytes: &[u8], field: usize, start: u32) -> [u8; 2] {
    let sum = bytes.chunks(2).enumerate().filter(|(index, _)| index * 2 != field);
    let mut sum = sum.fold(start, |sum, (_, pair)| sum + (u32::from(pair[0]) << 8 | u32::from(pair[1])));
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

/// Opens a raw socket on the veth of this thread's namespace.
fn packet_socket() -> std::os::fd::OwnedFd {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    // SAFETY: no pointers; the result is checked below.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0, "root may open a packet socket");
    // SAFETY: the descriptor is new and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let index = rustix::net::netdevice::name_to_index(&socket, VETH).expect("the veth is there");
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: 0,
        sll_ifindex: index as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: the address lives through the call and has the given length.
    let bound = unsafe {
        libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_ll>() as u32)
    };
    assert_eq!(bound, 0, "the packet socket can be bound");
    socket
}
