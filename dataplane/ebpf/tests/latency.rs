//! Kernel histograms: what we do shows, what others do does not.

mod lab;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use dataplane_ebpf::{Latency, LatencyConfig, Scope};
use lab::{Cgroup, Grandchild, alone, eventually, or_skip, programs, run};

const PROGRAMS: [&str; 6] =
    ["socket_state", "segment_resent", "segment_arrives", "socket_read", "request_issued", "request_done"];

fn config(scope: Scope) -> LatencyConfig {
    LatencyConfig { scope, segments: true, ..LatencyConfig::default() }
}

/// `count` connections, each with a message that its reader takes `delay` after it came.
fn talk(count: usize, delay: Duration) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is there");
    for _ in 0..count {
        let mut client = TcpStream::connect(listener.local_addr().expect("it is bound")).expect("it listens");
        let (mut server, _) = listener.accept().expect("a client waits");
        server.write_all(b"hello").expect("the client is there");
        std::thread::sleep(delay);
        client.read_exact(&mut [0; 5]).expect("it was sent");
    }
}

#[test]
fn own_connections_are_measured() {
    let _alone = alone();
    let Some(latency) = or_skip(Latency::attach(&config(Scope::Process))) else { return };
    let delay = Duration::from_millis(20);
    talk(5, delay);
    run(&[
        "python3",
        "-c",
        "import socket as s; l=s.create_server(('127.0.0.1',0)); s.create_connection(l.getsockname())",
    ])
    .unwrap_or_else(|why| why);
    // The close of an accepted socket may come a moment later.
    let mut shot = latency.snapshot().expect("the maps are there");
    eventually("the connections end", || {
        shot = latency.snapshot().expect("the maps are there");
        shot.lifetime.count() == 5
    });
    assert_eq!(shot.connect.count(), 5, "ours, and not those of python");
    let connect = shot.connect.quantile(1.0).expect("there are some");
    assert!(connect < Duration::from_millis(500), "{connect:?}");
    assert!(shot.lifetime.quantile(0.0).expect("there are some") >= delay);
    assert_eq!(shot.read_delay.count(), 5);
    let read = shot.read_delay.quantile(0.5).expect("there are some");
    assert!(read >= delay && read < delay * 20, "{read:?}");
    assert!(shot.round_trip.count() >= 5, "{}", shot.round_trip.count());
    assert_eq!(shot.untracked, 0);
    println!("connect {connect:?}, read delay {read:?}, round trip {:?}", shot.round_trip.quantile(0.5));
}

#[test]
fn a_cgroup_has_accepted_connections_too() {
    let _alone = alone();
    let Some(group) = Cgroup::enter() else { return };
    let Some(latency) = or_skip(Latency::attach(&config(Scope::Cgroup(group.path.clone())))) else { return };
    talk(3, Duration::ZERO);
    eventually("both ends of three connections end", || {
        latency.snapshot().expect("the maps are there").lifetime.count() == 6
    });
    let shot = latency.snapshot().expect("the maps are there");
    assert_eq!(shot.connect.count(), 3);
    drop(group);
    talk(3, Duration::ZERO);
    assert_eq!(latency.snapshot().expect("the maps are there").connect.count(), 3, "we have left the cgroup");
}

#[test]
fn own_block_requests_are_measured() {
    let _alone = alone();
    let Some(latency) = or_skip(Latency::attach(&config(Scope::Process))) else { return };
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(lab::unique("block"));
    let name = path.to_string_lossy().into_owned();
    // Another process first: none of its requests are ours.
    if let Err(why) =
        run(&["dd", "if=/dev/zero", &format!("of={name}"), "bs=64k", "count=16", "oflag=direct"])
    {
        println!("SKIPPED: {why}");
        return;
    }
    let shot = latency.snapshot().expect("the maps are there");
    assert_eq!((shot.block_read.count(), shot.block_write.count()), (0, 0));
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path)
        .expect("dd has made it");
    // Direct I/O wants an aligned buffer.
    let mut space = vec![1u8; 8192];
    let start = space.as_ptr().align_offset(4096);
    let buffer = &mut space[start..start + 4096];
    for at in 0..16 {
        std::os::unix::fs::FileExt::write_all_at(&file, buffer, at * 4096).expect("the disk writes");
    }
    for at in 0..32 {
        std::os::unix::fs::FileExt::read_exact_at(&file, buffer, at * 4096).expect("the disk reads");
    }
    std::fs::remove_file(&path).expect("it is ours");
    let shot = latency.snapshot().expect("the maps are there");
    println!(
        "reads {} p50 {:?}, writes {} p50 {:?}",
        shot.block_read.count(),
        shot.block_read.quantile(0.5),
        shot.block_write.count(),
        shot.block_write.quantile(0.5)
    );
    if shot.block_read.count() == 0 {
        println!("SKIPPED: {name} lies on no block device");
        return;
    }
    // Never more than there were. Fewer when the device's queue was full: a kernel thread issues what waited.
    assert!(shot.block_read.count() < 64, "{} reads", shot.block_read.count());
    assert!(shot.block_write.count() < 64, "{} writes", shot.block_write.count());
    // A device that is not there has no requests.
    let none = LatencyConfig { device: Some((4095, 77)), ..config(Scope::Machine) };
    let latency = or_skip(Latency::attach(&none)).expect("it worked before");
    let file = std::fs::File::create(&path).expect("the folder is writable");
    file.sync_all().expect("the disk writes");
    std::fs::remove_file(&path).expect("it is ours");
    assert_eq!(latency.snapshot().expect("the maps are there").block_write.count(), 0);
}

#[test]
fn it_detaches_on_kill() {
    let _alone = alone();
    if or_skip(Latency::attach(&config(Scope::Process))).is_none() {
        return;
    }
    eventually("earlier programs are gone", || programs(&PROGRAMS) == 0);
    let mut owner = Grandchild::start("child_owner", "");
    owner.wait_for("attached");
    assert_eq!(programs(&PROGRAMS), 6);
    owner.kill();
    eventually("the programs are gone", || programs(&PROGRAMS) == 0);
}

#[test]
fn child_owner() {
    if lab::child_argument().is_none() {
        return;
    }
    let _latency = Latency::attach(&config(Scope::Process)).expect("the parent could");
    println!("attached");
    lab::wait_for_parent();
}
