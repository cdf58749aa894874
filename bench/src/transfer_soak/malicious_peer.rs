//! A peer that holds the secret and sends invalid frames: it names slots that were not announced to it, guessed generations,
//! and bytes outside of slots, requests reads, and disconnects anywhere.
//!
//! The attacker speaks the TCP transport's protocol by hand (`dataplane/tcp/src/wire.rs` has the layout). Each attack
//! must end its connection and change no memory: the worker keeps slots that are announced to no peer, and
//! compares them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use dataplane_fabric::auth::{Authentication, DialledAddress, OPENING_BYTES, SharedKey, Transport};

use super::node::SLOT_BYTES;

const WRITE: u8 = 3;
const READ: u8 = 5;
/// Hellos of both sides with their proofs.
const HELLO_BYTES: usize = 64;
/// Longest time until the worker ends a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);

/// Counts of the attackers' work.
#[derive(Debug, Default)]
pub(crate) struct AttackCounts {
    /// Lies over admitted connections.
    pub(crate) attacks_sent: AtomicU64,
    /// Connections with a wrong secret.
    pub(crate) rejected_peers: AtomicU64,
}

/// A thread that sends invalid frames until it is stopped.
pub(crate) struct MaliciousPeer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl MaliciousPeer {
    /// Starts a thread that sends the node at `address` invalid frames about its slots, mostly those of `targets`.
    pub(crate) fn start(
        address: String,
        key: SharedKey,
        targets: Vec<u32>,
        seed: u64,
        attack_counts: Arc<AttackCounts>,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut random = fastrand::Rng::with_seed(seed);
            while !stopped.load(Ordering::Relaxed) {
                if random.u64(..8) == 0 {
                    check_wrong_secret(&address, &mut random)?;
                    attack_counts.rejected_peers.fetch_add(1, Ordering::Relaxed);
                } else {
                    let was_sent = send_attack(&address, &key, &targets, &mut random)?;
                    attack_counts.attacks_sent.fetch_add(u64::from(was_sent), Ordering::Relaxed);
                }
                std::thread::sleep(PAUSE);
            }
            Ok(())
        });
        Self { stop, thread }
    }

    /// Stops the thread. An error: an invalid frame was accepted.
    pub(crate) fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the attacker thread panicked"))?
    }
}

/// Opens and greets the connections of both lanes of a session; fewer if the node hung up.
fn join(address: &str, key: &SharedKey, session: u64) -> Result<Vec<TcpStream>> {
    let mut streams = Vec::new();
    for lane in 0..2_u8 {
        let mut stream = TcpStream::connect(address).context("the attacker cannot connect to the worker")?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(CLOSE_TIMEOUT))?;
        let (mut authentication, opening) = Authentication::connecting(Transport::Tcp.into())?;
        let mut answer = [0; OPENING_BYTES];
        if stream.write_all(&opening).is_err() || stream.read_exact(&mut answer).is_err() {
            return Ok(streams);
        }
        authentication.opened(&answer, DialledAddress::of(stream.peer_addr()?))?;
        let mut hello = [0; 32];
        hello[..8].copy_from_slice(b"KVSRTCP\0");
        hello[8..13].copy_from_slice(&[0, 0, lane, 0, 1]);
        hello[16] = 8;
        hello[24..].copy_from_slice(&session.to_le_bytes());
        let proof = authentication.prove(key, &hello)?;
        let mut answer = [0; HELLO_BYTES];
        if stream.write_all(&[&hello[..], &proof].concat()).is_err()
            || stream.read_exact(&mut answer).is_err()
        {
            return Ok(streams);
        }
        streams.push(stream);
    }
    Ok(streams)
}

fn check_wrong_secret(address: &str, random: &mut fastrand::Rng) -> Result<()> {
    let secret: Vec<u8> = (0..32).map(|_| b'a' + random.u64(..26) as u8).collect();
    let key = SharedKey::from_secret(&secret)?;
    ensure!(
        join(address, &key, random.u64(..u64::MAX))?.is_empty(),
        "a peer with a wrong secret was admitted"
    );
    Ok(())
}

/// Sends one invalid frame. `false`: the connection was refused for lack of room.
fn send_attack(address: &str, key: &SharedKey, targets: &[u32], random: &mut fastrand::Rng) -> Result<bool> {
    let mut streams = join(address, key, random.u64(..u64::MAX))?;
    let [_, stream] = &mut streams[..] else { return Ok(false) };
    let slot = match random.u64(..4) {
        0 => random.u64(..1 << 32) as u32,
        _ => targets[random.u64(..targets.len() as u64) as usize],
    };
    let len = match random.u64(..4) {
        0 => random.u64(..1 << 32) as u32,
        _ => 1 + random.u64(..SLOT_BYTES as u64) as u32,
    };
    let offset = if random.u64(..4) == 0 { random.u64(..1 << 32) as u32 } else { 0 };
    let mut header = [0; 32];
    header[0] = match random.u64(..6) {
        0 => random.u64(..256) as u8,
        1 => READ,
        _ => WRITE,
    };
    let generation = random.u64(..1 << 32) as u32;
    for (place, word) in header[4..].chunks_mut(4).zip([len, slot, generation, offset]) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    let payload = vec![0xEE; random.u64(..SLOT_BYTES as u64) as usize];
    // The node may have hung up after the header.
    let _hung_up = stream.write_all(&header).and_then(|()| stream.write_all(&payload));
    let _hung_up = stream.shutdown(std::net::Shutdown::Write);
    // Bytes that the worker sends before it hangs up must not be contents of its slots.
    let mut seen = Vec::new();
    let ended = stream.read_to_end(&mut seen);
    let timed_out = ended.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
    ensure!(!timed_out, "invalid frame accepted: the connection stays open after {header:?}");
    ensure!(seen.len() < 4096, "invalid read accepted: {} bytes were returned", seen.len());
    Ok(true)
}
