//! TLS for the gateway's listeners, with or without certificates of clients, and for its client side: https
//! to engines, to other gateways and to an identity provider. Certificates are reloaded without closing
//! connections.
//!
//! * [`ServerTlsConfig`], [`ClientTlsConfig`]: the files, and the requirements on the other side.
//! * [`ServerTls`]: the files of a listener, loaded, checked, and replaced as a whole by
//!   [`ServerTls::reload`] or [`ServerTls::watch`].
//! * [`TlsListener`], [`PlainListener`]: listeners for `axum::serve`. [`PeerAddr`] and [`ClientIdentity`]
//!   identify the peer to a handler.
//! * [`ClientSocket`]: the socket below either, which fails when its client has stopped reading.
//! * [`ClientTls`]: the same for the client side; it makes a [`ClientStream`] from a TCP connection.
//!
//! The only provider of cryptography, aws-lc-rs, is passed to rustls explicitly: no default is installed
//! for the process, so the order of start-up does not matter. TLS 1.2 and 1.3; sessions resume by tickets
//! where clients show no certificate; early data is off, because a request for tokens must not be replayed;
//! no key log can be turned on.
//!
//! Invariants: a connection keeps the files with which it began; a handshake uses all files of one load,
//! never a mixture of two; unusable files change nothing; no client can end the listener or delay the
//! handshake of another one for longer than [`HandshakeLimits`] allow.
//!
//! Hot path: none of its own. A handshake is one task, which ends with it; after that, bytes go from the
//! socket through rustls to hyper in hyper's own task, with no channel and no task between.
//!
//! Certificates were verified by rustls-webpki before `format.rs` reads names and the end of validity from them. That
//! reader takes 100 lines; x509-parser would bring ten crates for the same four fields.

#![forbid(unsafe_code)]

mod client;
mod config;
mod error;
mod format;
mod identity;
mod listener;
mod material;
mod plain;
mod reload;
mod server;
mod socket;

pub use client::{ClientStream, ClientTls};
pub use config::{Alpn, ClientCertificate, ClientTlsConfig, HandshakeLimits, ServerTlsConfig};
pub use error::TlsError;
pub use identity::{ClientIdentity, PeerAddr};
pub use listener::TlsListener;
pub use plain::PlainListener;
pub use reload::ReloadCounts;
pub use server::{HandshakeCounts, ServerStream, ServerTls};
pub use socket::{ClientSocket, set_dead_peer_timeout};
