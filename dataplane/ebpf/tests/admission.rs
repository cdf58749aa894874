//! XDP admission: each verdict by dry runs, then on a veth pair with real connections.

mod lab;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use dataplane_ebpf::{Admission, AdmissionConfig, AdmissionCounters, EbpfError, Prefix};
use lab::{Grandchild, Namespaces, VETH, alone, enter, eventually, or_skip, programs, run, within};

const PORT: u16 = 8000;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

fn config() -> AdmissionConfig {
    AdmissionConfig { ports: vec![PORT, 9000], ..AdmissionConfig::default() }
}

fn prefixes(texts: &[&str]) -> Vec<Prefix> {
    texts.iter().map(|text| text.parse().expect("it is a prefix")).collect()
}

fn tcp(port: u16, flags: u8) -> Vec<u8> {
    let mut header = vec![0; 20];
    header[0..2].copy_from_slice(&40000u16.to_be_bytes());
    header[2..4].copy_from_slice(&port.to_be_bytes());
    header[12] = 5 << 4;
    header[13] = flags;
    header
}

/// An IPv4 packet; `fragment` is the field with flags and offset.
fn ipv4(source: &str, protocol: u8, fragment: u16, options: usize, payload: &[u8]) -> Vec<u8> {
    let source: Ipv4Addr = source.parse().expect("it is an address");
    let mut header = vec![0; 20 + options];
    header[0] = 0x40 | (5 + options / 4) as u8;
    let total = (header.len() + payload.len()) as u16;
    header[2..4].copy_from_slice(&total.to_be_bytes());
    header[6..8].copy_from_slice(&fragment.to_be_bytes());
    header[8] = 64;
    header[9] = protocol;
    header[12..16].copy_from_slice(&source.octets());
    header[16..20].copy_from_slice(&[10, 99, 0, 1]);
    [&header, payload].concat()
}

fn ipv6(source: &str, next: u8, payload: &[u8]) -> Vec<u8> {
    let source: Ipv6Addr = source.parse().expect("it is an address");
    let mut header = vec![0; 40];
    header[0] = 0x60;
    header[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
    header[6] = next;
    header[7] = 64;
    header[8..24].copy_from_slice(&source.octets());
    header[39] = 1;
    [&header, payload].concat()
}

fn ethernet(types: &[u16], payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![2; 12];
    for (index, kind) in types.iter().enumerate() {
        if index > 0 {
            frame.extend([0, 7]);
        }
        frame.extend(kind.to_be_bytes());
    }
    frame.extend(payload);
    frame
}

fn v4(source: &str, flags: u8) -> Vec<u8> {
    ethernet(&[0x0800], &ipv4(source, 6, 0, 0, &tcp(PORT, flags)))
}

fn v6(source: &str, flags: u8) -> Vec<u8> {
    ethernet(&[0x86dd], &ipv6(source, 6, &tcp(PORT, flags)))
}

#[test]
fn every_kind_of_packet_has_its_verdict() {
    let _alone = alone();
    let allow = prefixes(&["10.1.0.0/16", "192.168.7.9", "fd00:1::/32"]);
    let Some(admission) = or_skip(Admission::load(&AdmissionConfig { allow, ..config() })) else { return };
    type Counter = fn(&AdmissionCounters) -> u64;
    let other: Counter = |c| c.passed_other;
    let connection: Counter = |c| c.passed_connection;
    let established: Counter = |c| c.passed_established;
    let prefix: Counter = |c| c.dropped_prefix;
    let fragment: Counter = |c| c.passed_fragment;
    let malformed: Counter = |c| c.passed_malformed;
    let extension: Counter = |c| c.passed_extension;
    let ip = |packet: Vec<u8>| ethernet(&[0x0800], &packet);
    let ip6 = |packet: Vec<u8>| ethernet(&[0x86dd], &packet);
    // A hop-by-hop or destination header of 8 bytes before `payload`.
    let extended = |next: u8, payload: &[u8]| [&[next, 0, 1, 4, 0, 0, 0, 0], payload].concat();
    let six_extensions = {
        let mut payload = extended(6, &tcp(PORT, SYN));
        for _ in 0..5 {
            payload = extended(60, &payload);
        }
        payload
    };
    let fragmented6 = |offset: u16, payload: &[u8]| {
        let [high, low] = offset.to_be_bytes();
        [&[6, 0, high, low, 0, 0, 0, 1], payload].concat()
    };
    let cases: Vec<(&str, Vec<u8>, bool, Counter)> = vec![
        ("allowed, new", v4("10.1.2.3", SYN), true, connection),
        ("allowed, data", v4("10.1.2.3", ACK), true, established),
        ("allowed, SYN+ACK", v4("10.1.2.3", SYN | ACK), true, established),
        ("single address", v4("192.168.7.9", SYN), true, connection),
        ("its neighbour", v4("192.168.7.8", SYN), false, prefix),
        ("denied, new", v4("10.2.2.3", SYN), false, prefix),
        ("denied, data", v4("10.2.2.3", ACK), false, prefix),
        ("second port", ip(ipv4("10.2.2.3", 6, 0, 0, &tcp(9000, SYN))), false, prefix),
        ("other port", ip(ipv4("10.2.2.3", 6, 0, 0, &tcp(22, SYN))), true, other),
        ("UDP", ip(ipv4("10.2.2.3", 17, 0, 0, &tcp(PORT, SYN))), true, other),
        ("ARP", ethernet(&[0x0806], &[0; 28]), true, other),
        ("IP options", ip(ipv4("10.2.2.3", 6, 0, 8, &tcp(PORT, SYN))), false, prefix),
        ("VLAN", ethernet(&[0x8100, 0x0800], &ipv4("10.2.2.3", 6, 0, 0, &tcp(PORT, SYN))), false, prefix),
        (
            "two VLAN tags",
            ethernet(&[0x88a8, 0x8100, 0x0800], &ipv4("10.2.2.3", 6, 0, 0, &tcp(PORT, SYN))),
            false,
            prefix,
        ),
        ("first fragment", ip(ipv4("10.2.2.3", 6, 0x2000, 0, &tcp(PORT, SYN))), false, prefix),
        ("tiny first fragment", ip(ipv4("10.2.2.3", 6, 0x2000, 0, &tcp(PORT, SYN)[..8])), false, prefix),
        ("tiny, but allowed", ip(ipv4("10.1.2.3", 6, 0x2000, 0, &tcp(PORT, SYN)[..8])), true, connection),
        ("later fragment", ip(ipv4("10.2.2.3", 6, 0x0010, 0, &tcp(PORT, SYN))), true, fragment),
        ("TCP cut short", ip(ipv4("10.1.2.3", 6, 0, 0, &tcp(PORT, SYN)[..13])), true, malformed),
        ("no ports", ip(ipv4("10.1.2.3", 6, 0, 0, &tcp(PORT, SYN)[..3])), true, malformed),
        ("IP cut short", ip(ipv4("10.1.2.3", 6, 0, 0, &[])[..19].to_vec()), true, malformed),
        (
            "IP version 5",
            ip([&[0x55], &ipv4("10.2.2.3", 6, 0, 0, &tcp(PORT, SYN))[1..]].concat()),
            true,
            malformed,
        ),
        (
            "IP header of 16 bytes",
            ip([&[0x44], &ipv4("10.2.2.3", 6, 0, 0, &tcp(PORT, SYN))[1..]].concat()),
            true,
            malformed,
        ),
        ("VLAN cut short", ethernet(&[0x8100], &[0, 7]), true, malformed),
        ("IPv6, allowed", v6("fd00:1::5", SYN), true, connection),
        ("IPv6, denied", v6("fd00:2::5", SYN), false, prefix),
        ("IPv6, data denied", v6("fd00:2::5", ACK), false, prefix),
        ("IPv6, other port", ip6(ipv6("fd00:2::5", 6, &tcp(22, SYN))), true, other),
        ("IPv6, UDP", ip6(ipv6("fd00:2::5", 17, &tcp(PORT, SYN))), true, other),
        ("IPv6, hop by hop", ip6(ipv6("fd00:2::5", 0, &extended(6, &tcp(PORT, SYN)))), false, prefix),
        ("IPv6, six extensions", ip6(ipv6("fd00:2::5", 60, &six_extensions)), true, extension),
        ("IPv6, extension cut short", ip6(ipv6("fd00:2::5", 60, &[6, 0, 1])), true, malformed),
        ("IPv6, first fragment", ip6(ipv6("fd00:2::5", 44, &fragmented6(1, &tcp(PORT, SYN)))), false, prefix),
        ("IPv6, later fragment", ip6(ipv6("fd00:2::5", 44, &fragmented6(0x41, &[0; 20]))), true, fragment),
        ("IPv6, no next header", ip6(ipv6("fd00:2::5", 59, &[])), true, other),
        ("IPv6 cut short", ip6(ipv6("fd00:2::5", 6, &[])[..39].to_vec()), true, malformed),
    ];
    for (name, frame, passes, counter) in cases {
        let before = admission.counters().expect("the maps are there");
        assert_eq!(admission.passes(&frame).expect("the kernel runs it"), passes, "{name}");
        let after = admission.counters().expect("the maps are there");
        assert_eq!(counter(&after), counter(&before) + 1, "{name}: {after:?}");
        assert_eq!(sum(&after), sum(&before) + 1, "{name}: {after:?}");
    }
}

fn sum(c: &AdmissionCounters) -> u64 {
    let passed = c.passed_other + c.passed_established + c.passed_connection + c.passed_fragment;
    let unjudged = c.passed_extension + c.passed_malformed;
    passed + unjudged + c.dropped_prefix + c.dropped_overload + c.dropped_source_rate + c.dropped_total_rate
}

#[test]
fn arbitrary_bytes_never_stop_the_program() {
    let _alone = alone();
    let Some(admission) = or_skip(Admission::load(&config())) else { return };
    let seed = 0x5eed_1234;
    println!("seed {seed:#x}");
    let mut random = lab::Random(seed);
    let models =
        [v4("10.1.2.3", SYN), v6("fd00::1", SYN), ethernet(&[0x8100, 0x0800], &v4("10.1.2.3", SYN)[14..])];
    for number in 0..20_000 {
        let mut frame = models[number % models.len()].clone();
        for _ in 0..random.next() % 6 {
            let at = 12 + random.next() as usize % (frame.len() - 12);
            frame[at] = random.next() as u8;
        }
        frame.truncate(14 + random.next() as usize % (frame.len() - 13));
        admission.passes(&frame).expect("the kernel runs it");
    }
    assert_eq!(sum(&admission.counters().expect("the maps are there")), 20_000);
}

#[test]
fn a_source_gets_its_burst_and_then_its_rate() {
    let _alone = alone();
    // A token each 200 ms: ten dry runs take far less.
    let change = AdmissionConfig { syn_rate_per_source: 5, syn_burst_per_source: 4, ..config() };
    let Some(admission) = or_skip(Admission::load(&change)) else { return };
    let passed =
        |frame: &[u8]| (0..10).filter(|_| admission.passes(frame).expect("the kernel runs it")).count();
    assert_eq!(passed(&v4("10.1.2.3", SYN)), 4);
    assert_eq!(passed(&v4("10.1.2.4", SYN)), 4);
    assert_eq!(passed(&v4("10.1.2.3", ACK)), 10, "only new connections cost tokens");
    assert_eq!(passed(&v6("fd00::1", SYN)), 4);
    assert_eq!(passed(&v6("fd00::2", SYN)), 0, "a /64 is one source");
    assert_eq!(passed(&v6("fd00:0:0:1::1", SYN)), 4);
    let before = admission.counters().expect("the maps are there");
    assert_eq!((before.passed_connection, before.dropped_source_rate), (16, 34));
    std::thread::sleep(Duration::from_millis(450));
    let refilled = passed(&v4("10.1.2.3", SYN));
    assert!((2..=4).contains(&refilled), "{refilled} tokens in 450 ms or a little more");
    std::thread::sleep(Duration::from_millis(900));
    assert_eq!(passed(&v4("10.1.2.3", SYN)), 4, "a bucket does not grow over its burst");
}

#[test]
fn all_sources_share_one_rate() {
    let _alone = alone();
    let change = AdmissionConfig { syn_rate: 1, syn_burst: 8, ..config() };
    let Some(admission) = or_skip(Admission::load(&change)) else { return };
    let passed =
        (0..20).filter(|n| admission.passes(&v4(&format!("10.1.2.{n}"), SYN)).expect("it runs")).count();
    assert_eq!(passed, 8);
    assert_eq!(admission.counters().expect("the maps are there").dropped_total_rate, 12);
}

#[test]
fn overload_drops_its_share() {
    let _alone = alone();
    let Some(mut admission) = or_skip(Admission::load(&config())) else { return };
    for (percent, range) in [(0, 1000..=1000), (100, 0..=0), (50, 400..=600), (0, 1000..=1000)] {
        admission.set_overload(percent).expect("it is in range");
        let passed = (0..1000).filter(|_| admission.passes(&v4("10.1.2.3", SYN)).expect("it runs")).count();
        assert!(range.contains(&passed), "{percent} %: {passed} of 1000 passed");
    }
    assert!(admission.passes(&v4("10.1.2.3", ACK)).expect("it runs"));
    assert!(matches!(admission.set_overload(101), Err(EbpfError::Configuration { .. })));
}

#[test]
fn an_allow_list_can_change() {
    let _alone = alone();
    let Some(mut admission) = or_skip(Admission::load(&config())) else { return };
    for (list, one, two, six) in [
        (&[][..], true, true, true),
        (&["10.1.0.0/16"][..], true, false, false),
        (&["10.2.0.0/16", "fd00::/8"], false, true, true),
        (&["0.0.0.0/0"], true, true, false),
        (&["::/0"], false, false, true),
        (&[], true, true, true),
    ] {
        admission.set_allow(&prefixes(list)).expect("it fits");
        for (source, expected) in
            [(v4("10.1.2.3", SYN), one), (v4("10.2.2.3", SYN), two), (v6("fd00::1", SYN), six)]
        {
            assert_eq!(admission.passes(&source).expect("it runs"), expected, "{list:?}");
        }
    }
    let many: Vec<Prefix> = (0..4097u32)
        .map(|n| Prefix::new(Ipv4Addr::from_bits(n << 8).into(), 24).expect("it is a prefix"))
        .collect();
    assert!(matches!(admission.set_allow(&many), Err(EbpfError::Configuration { .. })));
    admission.set_allow(&many[1..]).expect("4096 fit");
    admission.set_allow(&many[..4096]).expect("and may all change at once");
    assert!(admission.passes(&v4("0.0.0.9", SYN)).expect("it runs"));
    assert!(!admission.passes(&v4("0.16.0.9", SYN)).expect("it runs"));
}

#[test]
fn real_connections_on_a_veth_pair() {
    let _alone = alone();
    if or_skip(Admission::load(&config())).is_none() {
        return;
    }
    let Some(spaces) = Namespaces::new() else { return };
    let left = spaces.left.clone();
    let (mut admission, addresses) = within(&left, || {
        let addresses: Vec<SocketAddr> = ["10.99.0.1", "fd99::1"]
            .iter()
            .map(|ip| {
                let listener = TcpListener::bind((*ip, PORT)).expect("the address is up");
                let address = listener.local_addr().expect("it is bound");
                std::thread::spawn(move || {
                    for stream in listener.incoming() {
                        let mut byte = [0];
                        let mut stream = stream.expect("a client waits");
                        if stream.read_exact(&mut byte).is_ok() {
                            let _ = stream.write_all(&byte);
                        }
                    }
                });
                address
            })
            .collect();
        let interfaces = vec![VETH.to_owned()];
        (Admission::attach(&AdmissionConfig { interfaces, ..config() }), addresses)
    });
    let admission = admission.as_mut().expect("a veth takes it");
    println!("{:?}", admission.attached());
    assert!(admission.attached()[0].native, "a veth has native XDP");
    let right = spaces.right.clone();
    let reach = move |address: SocketAddr| {
        within(&right, move || {
            TcpStream::connect_timeout(&address, Duration::from_millis(400)).is_ok_and(|mut stream| {
                let mut byte = [0];
                stream.write_all(&[7]).is_ok() && stream.read_exact(&mut byte).is_ok() && byte == [7]
            })
        })
    };
    for (allow, reached) in
        [(&[][..], [true, true]), (&["10.99.0.0/24"], [true, false]), (&["fd99::2"], [false, true])]
    {
        admission.set_allow(&prefixes(allow)).expect("it fits");
        for (address, reached) in addresses.iter().zip(reached) {
            assert_eq!(reach(*address), reached, "{allow:?} {address}");
        }
    }
    let counters = admission.counters().expect("the maps are there");
    println!("{counters:?}");
    assert!(
        counters.dropped_prefix >= 2 && counters.passed_connection >= 4 && counters.passed_established >= 8
    );
    // One program for each interface.
    let busy = within(&left, || {
        let interfaces = vec![VETH.to_owned()];
        Admission::attach(&AdmissionConfig { interfaces, ..config() }).err().map(|off| off.to_string())
    });
    assert!(busy.as_deref().is_some_and(|text| text.contains("somebody else")), "{busy:?}");
    for name in ["nowhere0", "", "a name that is much too long", "nul\0"] {
        assert!(matches!(admission.attach_to(name), Err(EbpfError::NoInterface(_))), "{name:?}");
    }
}

#[test]
fn it_detaches_on_drop_and_on_kill() {
    let _alone = alone();
    if or_skip(Admission::load(&config())).is_none() {
        return;
    }
    let Some(spaces) = Namespaces::new() else { return };
    eventually("earlier programs are gone", || programs(&["admit"]) == 0);
    let shown = || {
        run(&["ip", "-n", &spaces.left, "link", "show", "dev", VETH]).expect("ip is there").contains("xdp")
    };
    let left = spaces.left.clone();
    let admission = within(&left, || {
        let interfaces = vec![VETH.to_owned()];
        Admission::attach(&AdmissionConfig { interfaces, ..config() }).expect("a veth takes it")
    });
    assert!(shown());
    drop(admission);
    assert!(!shown());
    let mut owner = Grandchild::start("child_owner", &spaces.left);
    owner.wait_for("attached");
    assert!(shown());
    assert_eq!(programs(&["admit"]), 1);
    owner.kill();
    eventually("the interface is free", || !shown());
    eventually("the program is gone", || programs(&["admit"]) == 0);
}

#[test]
fn child_owner() {
    let Some(namespace) = lab::child_argument() else { return };
    enter(&namespace);
    let interfaces = vec![VETH.to_owned()];
    let _admission =
        Admission::attach(&AdmissionConfig { interfaces, ..config() }).expect("the parent could");
    println!("attached");
    lab::wait_for_parent();
}
