//! KV events: recorded payloads, lost and repeated messages, sockets.

mod captures;
mod delivery;
mod sockets;
