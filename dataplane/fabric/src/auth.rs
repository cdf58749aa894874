//! Who may connect: each side of a handshake proves that it holds the cluster's secret.
//!
//! Every transport begins a connection in the same way:
//! 1. The side that connects sends an opening: a nonce that it has just drawn. The side that accepts answers with another.
//! 2. Each side's hello is followed by a proof: BLAKE3, keyed with the secret, over the side, both nonces, the address that
//!    was dialled and the hello. The side that connects goes first: the side that accepts makes no queue pair, passes no
//!    descriptor and names no block for a stranger.
//!
//! Both sides are proved, nothing can be replayed, and what a hello says (queue pairs, keys of memory) cannot be changed on
//! its way. A stranger who is dialled cannot pass the messages on to a peer either: the two would differ about the address.
//! For the same reason peers with a secret cannot have address translation between them.
//!
//! Limits: whoever can read the secret is a peer; the side that connects shows its hello to whoever it dials; and what
//! travels after the handshake is neither encrypted nor authenticated. Without a secret the same messages are exchanged
//! with a key that everybody knows, and without the address: anybody may connect.
//!
//! Once for each connection; not a hot path.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// Bytes of an opening.
pub const OPENING_BYTES: usize = 32;
/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;
/// Fewest bytes of a secret.
pub const SECRET_BYTES_MIN: usize = 32;

/// Help text of the counter `unproved_handshakes`, which every transport has.
pub const UNPROVED_HELP: &str = "Handshakes in which the peer did not prove that it holds this node's secret";

const MAGIC: [u8; 8] = *b"KVSRAUTH";
const VERSION: u8 = 1;
const NONCE_BYTES: usize = 16;
const NONCE_AT: usize = OPENING_BYTES - NONCE_BYTES;
/// Sets this use of the secret apart from every other.
const CONTEXT: &str = "kvasir 2026-11-27 data plane handshake";

type Nonce = [u8; NONCE_BYTES];

/// Why a peer is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The opening is of another protocol.
    #[error("not a peer of ours")]
    Stranger,
    /// The opening is of another version.
    #[error("a peer of another version")]
    Version,
    /// The proof does not match: the secrets differ, or the hello was changed or passed on by somebody.
    #[error(
        "its secret is not ours, or its hello was changed or passed on (transfer.secret_file, KVASIR_TRANSFER_SECRET)"
    )]
    Secret,
    /// A hello or a second opening where an opening was due, or the other way round.
    #[error("an opening or a hello out of its order")]
    Order,
    /// The system gave no random bytes.
    #[error("no random bytes")]
    Random,
}

/// A secret of too few bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the secret has {0} bytes; it takes at least {SECRET_BYTES_MIN}")]
pub struct ShortSecret(pub usize);

/// The key that the processes of a cluster share. The default is the key of those without a secret.
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
    /// The key of a secret. White space around it is not a part of it.
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

    /// Whether it keeps anybody out.
    #[must_use]
    pub fn is_secret(&self) -> bool {
        self.is_secret
    }
}

/// The address that was dialled, as both sides see it: the other end of the socket for the side that connects, the own end
/// for the side that accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dialled([u8; 18]);

impl Dialled {
    /// Of a socket whose other processes cannot be strangers' (a path, guarded by its peer's credentials).
    pub const LOCAL: Self = Self([0; 18]);

    /// Of an address of a socket; an IPv4 address is the same in either notation.
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
    /// The side that accepts waits for an opening.
    Awaited,
    /// The side that connects has sent this nonce.
    Opened(Nonce),
    /// Both nonces are known here.
    Agreed { side: Side, initiator: Nonce, acceptor: Nonce, dialled: Dialled },
}

/// One side's part in a handshake.
#[derive(Debug)]
pub struct Authentication(State);

impl Authentication {
    /// For a connection that was accepted.
    #[must_use]
    pub fn accepting() -> Self {
        Self(State::Awaited)
    }

    /// For a connection that this side makes; and the opening that it is to send.
    ///
    /// # Errors
    /// [`AuthError::Random`].
    pub fn connecting() -> Result<(Self, [u8; OPENING_BYTES]), AuthError> {
        let nonce = random_bytes()?;
        Ok((Self(State::Opened(nonce)), encode(&nonce)))
    }

    /// Whether both openings are here: hellos and their proofs follow.
    #[must_use]
    pub fn is_agreed(&self) -> bool {
        matches!(self.0, State::Agreed { .. })
    }

    /// Takes the other side's opening; on the side that accepts, returns the one to answer it with.
    ///
    /// # Errors
    /// [`AuthError::Stranger`], [`AuthError::Version`], [`AuthError::Random`], or [`AuthError::Order`] for a second opening.
    pub fn opened(
        &mut self,
        opening: &[u8; OPENING_BYTES],
        dialled: Dialled,
    ) -> Result<Option<[u8; OPENING_BYTES]>, AuthError> {
        let theirs = decode(opening)?;
        match self.0 {
            State::Awaited => {
                let ours = random_bytes()?;
                self.0 = State::Agreed { side: Side::Acceptor, initiator: theirs, acceptor: ours, dialled };
                Ok(Some(encode(&ours)))
            }
            State::Opened(ours) => {
                self.0 = State::Agreed { side: Side::Initiator, initiator: ours, acceptor: theirs, dialled };
                Ok(None)
            }
            State::Agreed { .. } => Err(AuthError::Order),
        }
    }

    /// The proof that follows this side's hello.
    ///
    /// # Errors
    /// [`AuthError::Order`] before both openings are here.
    pub fn prove(&self, key: &SharedKey, hello: &[u8]) -> Result<[u8; PROOF_BYTES], AuthError> {
        let State::Agreed { side, .. } = self.0 else { return Err(AuthError::Order) };
        Ok(*self.proof(key, side, hello)?.as_bytes())
    }

    /// Checks the proof that followed the other side's hello. The time it takes says nothing about the secret.
    ///
    /// # Errors
    /// [`AuthError::Secret`]; [`AuthError::Order`] before both openings are here.
    pub fn check(&self, key: &SharedKey, hello: &[u8], proof: &[u8; PROOF_BYTES]) -> Result<(), AuthError> {
        let State::Agreed { side, .. } = self.0 else { return Err(AuthError::Order) };
        let other = if side == Side::Initiator { Side::Acceptor } else { Side::Initiator };
        // `blake3::Hash` compares in constant time.
        if self.proof(key, other, hello)? == blake3::Hash::from_bytes(*proof) {
            Ok(())
        } else {
            Err(AuthError::Secret)
        }
    }

    fn proof(&self, key: &SharedKey, side: Side, hello: &[u8]) -> Result<blake3::Hash, AuthError> {
        let State::Agreed { initiator, acceptor, dialled, .. } = &self.0 else {
            return Err(AuthError::Order);
        };
        let dialled = if key.is_secret { *dialled } else { Dialled::LOCAL };
        let mut hasher = blake3::Hasher::new_keyed(&key.key);
        hasher.update(&[side as u8]).update(initiator).update(acceptor).update(&dialled.0).update(hello);
        Ok(hasher.finalize())
    }
}

/// Bytes that nobody can guess.
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

/// Number `index` of a sequence that only a holder of the seed can compute, whatever else of the sequence is known.
#[must_use]
pub fn unguessable(seed: u64, index: u64) -> u64 {
    let key = blake3::derive_key("kvasir 2026-11-27 names of sessions", &seed.to_le_bytes());
    let mut name = [0; 8];
    blake3::Hasher::new_keyed(&key).update(&index.to_le_bytes()).finalize_xof().fill(&mut name);
    u64::from_le_bytes(name)
}

fn encode(nonce: &Nonce) -> [u8; OPENING_BYTES] {
    let mut bytes = [0; OPENING_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8] = VERSION;
    bytes[NONCE_AT..].copy_from_slice(nonce);
    bytes
}

fn decode(bytes: &[u8; OPENING_BYTES]) -> Result<Nonce, AuthError> {
    if bytes[..8] != MAGIC || bytes[9..NONCE_AT].iter().any(|&byte| byte != 0) {
        return Err(AuthError::Stranger);
    }
    if bytes[8] != VERSION {
        return Err(AuthError::Version);
    }
    let mut nonce = [0; NONCE_BYTES];
    nonce.copy_from_slice(&bytes[NONCE_AT..]);
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sides() -> (Authentication, Authentication) {
        sides_at(Dialled::LOCAL, Dialled::LOCAL)
    }

    fn sides_at(from: Dialled, at: Dialled) -> (Authentication, Authentication) {
        let (mut initiator, bytes) = Authentication::connecting().expect("random bytes");
        let mut acceptor = Authentication::accepting();
        let answer = acceptor.opened(&bytes, at).expect("an opening").expect("an answer");
        assert_eq!(initiator.opened(&answer, from), Ok(None));
        (initiator, acceptor)
    }

    fn key(secret: &str) -> SharedKey {
        SharedKey::from_secret(secret.repeat(32).as_bytes()).expect("long enough")
    }

    /// Keyed BLAKE3 over the index, under a key that is derived from the seed: computed from these definitions.
    #[test]
    fn numbers_of_a_sequence_are_those_of_their_seed_and_index() {
        let key = blake3::derive_key("kvasir 2026-11-27 names of sessions", &7_u64.to_le_bytes());
        let third = blake3::keyed_hash(&key, &3_u64.to_le_bytes());
        let third = u64::from_le_bytes(third.as_bytes()[..8].try_into().expect("eight bytes"));
        assert_eq!(unguessable(7, 3), third);
        let numbers: std::collections::HashSet<u64> =
            (0..100).flat_map(|index| [unguessable(7, index), unguessable(8, index)]).collect();
        assert_eq!(numbers.len(), 200);
    }

    #[test]
    fn both_sides_prove_the_same_secret_and_no_other() {
        let (initiator, acceptor) = sides();
        let keys = [key("a"), key("b"), SharedKey::default()];
        for ours in &keys {
            for theirs in &keys {
                let expected = if ours == theirs { Ok(()) } else { Err(AuthError::Secret) };
                let proof = initiator.prove(theirs, b"hello").expect("agreed");
                assert_eq!(acceptor.check(ours, b"hello", &proof), expected);
                let proof = acceptor.prove(theirs, b"hello").expect("agreed");
                assert_eq!(initiator.check(ours, b"hello", &proof), expected);
            }
        }
    }

    #[test]
    fn a_proof_is_of_no_use_for_anything_else() {
        let key = key("a");
        let (initiator, acceptor) = sides();
        let proof = initiator.prove(&key, b"hello").expect("agreed");
        assert_eq!(acceptor.check(&key, b"hellp", &proof), Err(AuthError::Secret), "a changed hello");
        assert_eq!(initiator.check(&key, b"hello", &proof), Err(AuthError::Secret), "sent back");
        assert_eq!(sides().1.check(&key, b"hello", &proof), Err(AuthError::Secret), "sent again");
    }

    #[test]
    fn a_hello_that_is_passed_on_proves_nothing() {
        let address = |text: &str| Dialled::of(text.parse().expect("an address"));
        let (one, mapped) = (address("10.0.0.1:7"), address("[::ffff:10.0.0.1]:7"));
        for (dialled, at, is_good) in [
            (one, mapped, true),
            (one, address("10.0.0.2:7"), false),
            (one, address("10.0.0.1:8"), false),
            (one, address("[::1]:7"), false),
        ] {
            let (initiator, acceptor) = sides_at(dialled, at);
            let proof = initiator.prove(&key("a"), b"hello").expect("agreed");
            assert_eq!(acceptor.check(&key("a"), b"hello", &proof).is_ok(), is_good, "{dialled:?} {at:?}");
            let proof = initiator.prove(&SharedKey::default(), b"hello").expect("agreed");
            assert_eq!(acceptor.check(&SharedKey::default(), b"hello", &proof), Ok(()));
        }
    }

    #[test]
    fn other_openings_are_refused() {
        let (connecting, good) = Authentication::connecting().expect("random bytes");
        assert_eq!(connecting.prove(&key("a"), b"hello"), Err(AuthError::Order));
        assert_eq!(sides().0.opened(&good, Dialled::LOCAL), Err(AuthError::Order), "a second opening");
        for (at, value, error) in
            [(0, b'X', AuthError::Stranger), (8, 2, AuthError::Version), (9, 1, AuthError::Stranger)]
        {
            let mut bad = good;
            bad[at] = value;
            assert_eq!(Authentication::accepting().opened(&bad, Dialled::LOCAL), Err(error), "byte {at}");
        }
    }

    #[test]
    fn secrets_are_long_and_are_not_shown() {
        let short = [b'a'; SECRET_BYTES_MIN - 1];
        assert_eq!(SharedKey::from_secret(&short), Err(ShortSecret(31)));
        assert_eq!(SharedKey::from_secret(b" \n"), Err(ShortSecret(0)));
        let padded = format!("  {}\n", "a".repeat(32));
        assert_eq!(SharedKey::from_secret(padded.as_bytes()), Ok(key("a")));
        assert_eq!(format!("{:?} {:?}", key("a"), SharedKey::default()), "SharedKey(..) SharedKey(none)");
    }
}
