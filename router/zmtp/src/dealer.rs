//! DEALER: connected to one server.

use bytes::Bytes;

use crate::connection::Connection;
use crate::wire::{self, SocketKind};
use crate::{Error, Limits};

/// A DEALER socket that is connected to one ROUTER or REP.
#[derive(Debug)]
pub struct DealerSocket {
    connection: Connection,
}

impl DealerSocket {
    /// Connects.
    ///
    /// # Errors
    ///
    /// The server cannot be reached, or is none.
    pub async fn connect(endpoint: &str, limits: Limits) -> Result<Self, Error> {
        Ok(Self { connection: Connection::connect(endpoint, SocketKind::Dealer, &limits).await? })
    }

    /// Sends a request, with the empty frame before it that the server expects. Not cancel-safe.
    ///
    /// # Errors
    ///
    /// The connection has ended.
    pub async fn send(&mut self, parts: &[Bytes]) -> Result<(), Error> {
        self.connection.writer.write(wire::message(parts)).await
    }

    /// The next reply. Cancel-safe.
    ///
    /// # Errors
    ///
    /// The connection has ended.
    pub async fn recv(&mut self) -> Result<Vec<Bytes>, Error> {
        self.connection.receive().await
    }
}
