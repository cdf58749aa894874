//! Authentication of peers: each side of a handshake proves that it holds the cluster's secret.
//!
//! Every transport begins a connection in the same way:
//! 1. The connecting side sends an opening: the transport, the protocol versions that it speaks, and a fresh
//!    nonce. The accepting side answers with its own opening.
//! 2. Each side's hello is followed by a proof: BLAKE3, keyed with the secret, over the side, both openings,
//!    the address that was dialled and the hello. The connecting side goes first, so that the accepting side
//!    makes no queue pair, passes no descriptor and names no block for a stranger.
//!
//! From the hellos on, both sides speak the newest version that both know ([`Versions`]). Processes of two
//! releases work together while their ranges overlap, so a cluster is upgraded node by node. The version
//! covers hellos, frames and rings of every transport and the frames of a bond; messages of hand-offs have
//! versions of their own.
//!
//! Both sides are authenticated, nothing can be replayed, and the contents of openings and hellos (versions,
//! queue pairs, keys of memory) cannot be changed in transit. A stranger who is dialled cannot relay the
//! messages to a peer either: the two sides would have different addresses. For the same reason peers with a
//! secret cannot have address translation between them.
//!
//! Limits: every process that can read the secret is a peer; the connecting side shows its hello to any
//! process that it dials; and the traffic after the handshake is neither encrypted nor authenticated. Without
//! a secret the same messages are exchanged with a publicly known key and without the address: any process
//! can connect.
//!
//! Runs once for each connection; not a hot path.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// Length of an opening.
pub const OPENING_BYTES: usize = 32;
/// Length of a proof.
pub const PROOF_BYTES: usize = 32;
/// Shortest secret.
pub const SECRET_BYTES_MIN: usize = 32;

/// Help text of the counter `unproved_handshakes`, which every transport has.
pub const UNPROVED_HELP: &str = "Handshakes in which the peer did not prove that it holds this node's secret";

const MAGIC: [u8; 8] = *b"KVSRAUTH";
/// Format of the opening itself. The layout of an opening does not change under the same number.
const FORMAT: u8 = 2;
const TRANSPORT_AT: usize = 9;
const OLDEST_AT: usize = 10;
const NEWEST_AT: usize = 12;
const NONCE_BYTES: usize = 16;
const NONCE_AT: usize = OPENING_BYTES - NONCE_BYTES;
/// Key derivation context: separates this use of the secret from every other.
const CONTEXT: &str = "kvasir 2026-11-27 data plane handshake";

/// The versions of a protocol that a process speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    /// The oldest version.
    pub oldest: u16,
    /// The newest version.
    pub newest: u16,
}

impl fmt::Display for Versions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.oldest == self.newest {
            write!(formatter, "version {}", self.newest)
        } else {
            write!(formatter, "versions {} to {}", self.oldest, self.newest)
        }
    }
}

impl Versions {
    /// Returns the newest version that both sides speak.
    #[must_use]
    pub fn common(self, theirs: Self) -> Option<u16> {
        let newest = self.newest.min(theirs.newest);
        (newest >= self.oldest.max(theirs.oldest)).then_some(newest)
    }
}

/// The transport of a connection. Both sides must name the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Transport {
    /// Shared memory.
    Shm = 1,
    /// TCP.
    Tcp = 2,
    /// RDMA.
    Rdma = 3,
    /// Device memory that processes of one host share.
    CudaIpc = 4,
}

/// The transport and the versions in a side's opening.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Protocol {
    /// The transport.
    pub transport: Transport,
    /// The versions that the side speaks.
    pub versions: Versions,
}

impl Transport {
    /// Returns the protocol versions over the transport that this release speaks.
    #[must_use]
    pub fn versions(self) -> Versions {
        let only = |version| Versions { oldest: version, newest: version };
        match self {
            Self::Shm | Self::Tcp | Self::CudaIpc => only(1),
            // Since version 2 a hello describes host slots and a device's slots.
            Self::Rdma => only(2),
        }
    }
}

impl From<Transport> for Protocol {
    /// This release's versions over the transport.
    fn from(transport: Transport) -> Self {
        Self { transport, versions: transport.versions() }
    }
}

type Opening = [u8; OPENING_BYTES];

/// Reason for which a peer is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The opening is of another protocol.
    #[error("not a peer of ours")]
    Stranger,
    /// The opening has another format.
    #[error("a peer of another release, whose first message is not understood")]
    Format,
    /// The address is one of another transport.
    #[error("a peer of another transport")]
    Transport,
    /// The two sides have no version in common.
    #[error("the peer speaks {theirs} of the protocol, and this process {ours}")]
    Version {
        /// Versions of the peer.
        theirs: Versions,
        /// Versions of this process.
        ours: Versions,
    },
    /// The proof does not match: the secrets differ, or the hello was changed or relayed.
    #[error(
        "its secret is not ours, or its hello was changed or passed on (transfer.secret_file, KVASIR_TRANSFER_SECRET)"
    )]
    Secret,
    /// A hello or a second opening where an opening was due, or an opening where a hello was due.
    #[error("the peer sent an opening or a hello out of order")]
    Order,
    /// The system gave no random bytes.
    #[error("no random bytes")]
    Random,
}

/// A secret of too few bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the secret has {0} bytes; it takes at least {SECRET_BYTES_MIN}")]
pub struct ShortSecret(pub usize);

/// The key that the processes of a cluster share. The default is the publicly known key of processes without
/// a secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SharedKey {
    key: [u8; 32],
    is_secret: bool,
}

impl fmt::Debug for SharedKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.is_secret { "SharedKey(..)" } else { "SharedKey(none)" })
    }
}

impl SharedKey {
    /// Derives the key from a secret. White space around the secret is ignored.
    ///
    /// # Errors
    /// [`ShortSecret`] when it has fewer than [`SECRET_BYTES_MIN`] bytes.
    pub fn from_secret(secret: &[u8]) -> Result<Self, ShortSecret> {
        let secret = secret.trim_ascii();
        if secret.len() < SECRET_BYTES_MIN {
            return Err(ShortSecret(secret.len()));
        }
        Ok(Self { key: blake3::derive_key(CONTEXT, secret), is_secret: true })
    }

    /// Whether the key comes from a secret, so that processes without it are refused.
    #[must_use]
    pub fn is_secret(&self) -> bool {
        self.is_secret
    }
}

/// The dialled address as both sides see it: the remote address of the socket on the connecting side, the
/// local address on the accepting side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DialledAddress([u8; 18]);

impl DialledAddress {
    /// For a socket that strangers cannot reach (a path, guarded by the peer's credentials).
    pub const LOCAL: Self = Self([0; 18]);

    /// Takes the address of a socket; an IPv4 address is the same in either notation.
    #[must_use]
    pub fn of(address: SocketAddr) -> Self {
        let mut bytes = [0; 18];
        let ip = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes[..16].copy_from_slice(&ip.octets());
        bytes[16..].copy_from_slice(&address.port().to_be_bytes());
        Self(bytes)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Initiator = 1,
    Acceptor = 2,
}

#[derive(Debug)]
enum State {
    /// The accepting side waits for an opening.
    Awaited,
    /// The connecting side has sent this opening.
    Opened(Opening),
    /// Both openings are known.
    Agreed { side: Side, initiator: Opening, acceptor: Opening, dialled: DialledAddress },
}

/// One side's state in a handshake.
#[derive(Debug)]
pub struct Authentication {
    protocol: Protocol,
    state: State,
    /// Newest version that both sides speak, once both openings are known.
    version: Option<u16>,
}

impl Authentication {
    /// Starts the handshake of an accepted connection.
    #[must_use]
    pub fn accepting(protocol: Protocol) -> Self {
        Self { protocol, state: State::Awaited, version: None }
    }

    /// Starts the handshake of a connection that this side makes, and returns the opening to send.
    ///
    /// # Errors
    /// [`AuthError::Random`].
    pub fn connecting(protocol: Protocol) -> Result<(Self, [u8; OPENING_BYTES]), AuthError> {
        let opening = encode(protocol)?;
        Ok((Self { protocol, state: State::Opened(opening), version: None }, opening))
    }

    /// Whether both openings are known: hellos and their proofs follow.
    #[must_use]
    pub fn is_agreed(&self) -> bool {
        matches!(self.state, State::Agreed { .. })
    }

    /// Returns the version that both sides speak; `None` before both openings are known, and when there is
    /// none.
    #[must_use]
    pub fn version(&self) -> Option<u16> {
        self.version
    }

    /// Takes the other side's opening. On the accepting side, returns the opening to answer with. The
    /// accepting side also answers a peer without a common version, so that the peer learns the reason; the
    /// hello of that peer is then refused.
    ///
    /// # Errors
    /// [`AuthError::Stranger`], [`AuthError::Format`], [`AuthError::Transport`], [`AuthError::Random`], [`AuthError::Version`] on
    /// the side that connects, or [`AuthError::Order`] for a second opening.
    pub fn opened(
        &mut self,
        opening: &[u8; OPENING_BYTES],
        dialled: DialledAddress,
    ) -> Result<Option<[u8; OPENING_BYTES]>, AuthError> {
        decode(opening, self.protocol.transport)?;
        let theirs = *opening;
        let version = self.protocol.versions.common(versions_of(&theirs));
        match self.state {
            State::Awaited => {
                let ours = encode(self.protocol)?;
                self.state =
                    State::Agreed { side: Side::Acceptor, initiator: theirs, acceptor: ours, dialled };
                self.version = version;
                Ok(Some(ours))
            }
            State::Opened(_) if version.is_none() => Err(self.no_version(&theirs)),
            State::Opened(ours) => {
                self.state =
                    State::Agreed { side: Side::Initiator, initiator: ours, acceptor: theirs, dialled };
                self.version = version;
                Ok(None)
            }
            State::Agreed { .. } => Err(AuthError::Order),
        }
    }

    fn no_version(&self, theirs: &Opening) -> AuthError {
        AuthError::Version { theirs: versions_of(theirs), ours: self.protocol.versions }
    }

    /// Returns the proof that follows this side's hello.
    ///
    /// # Errors
    /// [`AuthError::Order`] before both openings are known.
    pub fn prove(&self, key: &SharedKey, hello: &[u8]) -> Result<[u8; PROOF_BYTES], AuthError> {
        let State::Agreed { side, .. } = self.state else { return Err(AuthError::Order) };
        Ok(*self.proof(key, side, hello)?.as_bytes())
    }

    /// Checks the proof that followed the other side's hello, in constant time.
    ///
    /// # Errors
    /// [`AuthError::Secret`]; [`AuthError::Version`] when no version is common; [`AuthError::Order`] before
    /// both openings are known.
    pub fn check(&self, key: &SharedKey, hello: &[u8], proof: &[u8; PROOF_BYTES]) -> Result<(), AuthError> {
        let State::Agreed { side, initiator, acceptor, .. } = &self.state else {
            return Err(AuthError::Order);
        };
        let side = *side;
        if self.version.is_none() {
            return Err(self.no_version(if side == Side::Acceptor { initiator } else { acceptor }));
        }
        let other = if side == Side::Initiator { Side::Acceptor } else { Side::Initiator };
        // `blake3::Hash` compares in constant time.
        if self.proof(key, other, hello)? == blake3::Hash::from_bytes(*proof) {
            Ok(())
        } else {
            Err(AuthError::Secret)
        }
    }

    fn proof(&self, key: &SharedKey, side: Side, hello: &[u8]) -> Result<blake3::Hash, AuthError> {
        let State::Agreed { initiator, acceptor, dialled, .. } = &self.state else {
            return Err(AuthError::Order);
        };
        let dialled = if key.is_secret { *dialled } else { DialledAddress::LOCAL };
        let mut hasher = blake3::Hasher::new_keyed(&key.key);
        hasher.update(&[side as u8]).update(initiator).update(acceptor).update(&dialled.0).update(hello);
        Ok(hasher.finalize())
    }
}

/// Returns random bytes of the system.
///
/// # Errors
/// [`AuthError::Random`] when the system has none.
pub fn random_bytes<const N: usize>() -> Result<[u8; N], AuthError> {
    let mut bytes = [0; N];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(filled) if filled == N => Ok(bytes),
        _ => Err(AuthError::Random),
    }
}

/// Returns element `index` of a sequence that only a holder of the seed can compute, even if the other
/// elements are known.
#[must_use]
pub fn keyed_sequence(seed: u64, index: u64) -> u64 {
    let key = blake3::derive_key("kvasir 2026-11-27 names of sessions", &seed.to_le_bytes());
    let mut name = [0; 8];
    blake3::Hasher::new_keyed(&key).update(&index.to_le_bytes()).finalize_xof().fill(&mut name);
    u64::from_le_bytes(name)
}

fn encode(protocol: Protocol) -> Result<Opening, AuthError> {
    let mut bytes = [0; OPENING_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8] = FORMAT;
    bytes[TRANSPORT_AT] = protocol.transport as u8;
    bytes[OLDEST_AT..NEWEST_AT].copy_from_slice(&protocol.versions.oldest.to_le_bytes());
    bytes[NEWEST_AT..NEWEST_AT + 2].copy_from_slice(&protocol.versions.newest.to_le_bytes());
    bytes[NONCE_AT..].copy_from_slice(&random_bytes::<NONCE_BYTES>()?);
    Ok(bytes)
}

/// Fuzzing: takes an opening of a stranger, and a hello with its proof, on both sides.
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) {
    let Some((opening, rest)) = bytes.split_first_chunk() else { return };
    let mut acceptor = Authentication::accepting(Transport::Tcp.into());
    let Ok((mut initiator, _)) = Authentication::connecting(Transport::Tcp.into()) else { return };
    for side in [&mut acceptor, &mut initiator] {
        let opened = side.opened(opening, DialledAddress::LOCAL);
        let theirs = versions_of(opening);
        let is_common = opened.is_ok() && Transport::Tcp.versions().common(theirs).is_some();
        assert_eq!(side.version().is_some(), is_common, "{opened:?} {theirs:?}");
        if let Some((proof, hello)) = rest.split_first_chunk() {
            assert!(side.check(&SharedKey::default(), hello, proof).is_err(), "nobody has this side's nonce");
        }
    }
}

/// Whether the bytes are an opening of this transport.
fn decode(bytes: &Opening, transport: Transport) -> Result<(), AuthError> {
    if bytes[..8] != MAGIC {
        return Err(AuthError::Stranger);
    }
    if bytes[8] != FORMAT || bytes[NEWEST_AT + 2..NONCE_AT] != [0; 2] {
        return Err(AuthError::Format);
    }
    if bytes[TRANSPORT_AT] != transport as u8 {
        return Err(AuthError::Transport);
    }
    Ok(())
}

fn versions_of(bytes: &Opening) -> Versions {
    let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    Versions { oldest: number(OLDEST_AT), newest: number(NEWEST_AT) }
}

#[cfg(test)]
mod tests;
