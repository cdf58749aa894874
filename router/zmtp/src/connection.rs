//! One connection: the handshake, events in, bytes out.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use crate::Error;
use crate::endpoint::Stream;
use crate::limits::{Limits, READ_BYTES};
use crate::wire::{self, Command, Decoder, Event, SocketKind};

/// A connection after its handshake.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) reader: Reader,
    pub(crate) writer: Writer,
    /// Minor version of the peer's ZMTP 3.
    pub(crate) minor: u8,
}

impl Connection {
    /// Connects and shakes hands.
    pub(crate) async fn connect(endpoint: &str, kind: SocketKind, limits: &Limits) -> Result<Self, Error> {
        let connecting = async { greet(Stream::connect(endpoint).await?, kind, limits, None).await };
        let done = timeout(limits.handshake_within, connecting).await;
        done.unwrap_or(Err(Error::Slow("connection and handshake")))
    }

    /// Shakes hands on a connection that has come. Incomplete messages count against `budget`.
    pub(crate) async fn accept(
        stream: Stream,
        kind: SocketKind,
        limits: &Limits,
        budget: Arc<Semaphore>,
    ) -> Result<Self, Error> {
        let done = timeout(limits.handshake_within, greet(stream, kind, limits, Some(budget))).await;
        done.unwrap_or(Err(Error::Slow("handshake")))
    }

    /// The next message. Answers PINGs. Cancel-safe.
    pub(crate) async fn receive(&mut self) -> Result<Vec<Bytes>, Error> {
        loop {
            self.writer.flush().await?;
            match self.reader.next().await? {
                Event::Message(parts) => return Ok(parts),
                Event::Command(Command::Ping { context }) => self.writer.queue(&wire::pong(&context)),
                Event::Command(_) | Event::Greeting { .. } => {}
            }
        }
    }
}

/// Greeting and READY, both ways.
async fn greet(
    stream: Stream,
    kind: SocketKind,
    limits: &Limits,
    budget: Option<Arc<Semaphore>>,
) -> Result<Connection, Error> {
    let (read, write) = tokio::io::split(stream);
    let mut reader = Reader::new(read, limits, budget);
    let mut writer = Writer::new(write, limits.write_within);
    writer.write(Bytes::copy_from_slice(&wire::greeting())).await?;
    let Event::Greeting { minor } = reader.next().await? else {
        return Err(Error::Handshake("no greeting"));
    };
    writer.write(wire::ready(kind)).await?;
    match reader.next().await? {
        Event::Command(Command::Ready { kind: peer }) if kind.accepts(peer) => {
            Ok(Connection { reader, writer, minor })
        }
        Event::Command(Command::Ready { .. }) => {
            Err(Error::Handshake("the peer's socket is of a wrong kind"))
        }
        Event::Command(Command::Error(reason)) => {
            Err(Error::Refused(String::from_utf8_lossy(&reason).into_owned()))
        }
        _ => Err(Error::Handshake("no READY")),
    }
}

/// Bytes of incomplete messages, shared by the peers of a socket.
#[derive(Debug)]
struct Budget {
    whole: Arc<Semaphore>,
    held: Option<OwnedSemaphorePermit>,
}

impl Budget {
    /// Raises the reserved charge to `bytes`.
    fn raise(&mut self, bytes: usize) -> Result<(), Error> {
        let missing = bytes.saturating_sub(self.held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits));
        if missing == 0 {
            return Ok(());
        }
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        let more = Arc::clone(&self.whole).try_acquire_many_owned(missing);
        let more = more.map_err(|_| Error::Limit("bytes of incomplete messages"))?;
        match &mut self.held {
            Some(held) => held.merge(more),
            None => self.held = Some(more),
        }
        Ok(())
    }
}

/// Events in.
#[derive(Debug)]
pub(crate) struct Reader {
    half: ReadHalf<Stream>,
    decoder: Decoder,
    buffer: Box<[u8]>,
    /// Bytes of the buffer that were read and not decoded.
    unread: std::ops::Range<usize>,
    message_within: Duration,
    /// When the message that has begun must be complete.
    deadline: Option<Instant>,
    budget: Option<Budget>,
}

impl Reader {
    fn new(half: ReadHalf<Stream>, limits: &Limits, budget: Option<Arc<Semaphore>>) -> Self {
        Self {
            half,
            decoder: Decoder::new(*limits),
            buffer: vec![0; READ_BYTES].into_boxed_slice(),
            unread: 0..0,
            message_within: limits.message_within,
            deadline: None,
            budget: budget.map(|whole| Budget { whole, held: None }),
        }
    }

    /// The next event. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<Event, Error> {
        loop {
            let mut input = &self.buffer[self.unread.clone()];
            let event = self.decoder.next(&mut input)?;
            self.unread.start = self.unread.end - input.len();
            if let Some(event) = event {
                self.deadline = None;
                return Ok(event);
            }
            if let Some(budget) = &mut self.budget {
                budget.raise(self.decoder.held_bytes())?;
            }
            let reading = self.half.read(&mut self.buffer);
            let count = if self.decoder.is_partial() {
                let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + self.message_within);
                timeout_at(deadline, reading).await.map_err(|_| Error::Slow("an incomplete message"))??
            } else {
                reading.await?
            };
            if count == 0 {
                return Err(Error::Closed);
            }
            self.unread = 0..count;
        }
    }

    /// The share of the budget that the message just returned has taken. Drop it when the message was delivered.
    pub(crate) fn take_charge(&mut self) -> Option<OwnedSemaphorePermit> {
        self.budget.as_mut().and_then(|budget| budget.held.take())
    }
}

/// Bytes out.
#[derive(Debug)]
pub(crate) struct Writer {
    half: WriteHalf<Stream>,
    within: Duration,
    pending: BytesMut,
}

impl Writer {
    fn new(half: WriteHalf<Stream>, within: Duration) -> Self {
        Self { half, within, pending: BytesMut::new() }
    }

    /// Leaves bytes to [`Writer::flush`].
    pub(crate) fn queue(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// Writes what was queued. Cancel-safe.
    pub(crate) async fn flush(&mut self) -> Result<(), Error> {
        drain(&mut self.half, &mut self.pending, self.within).await
    }

    /// Writes all of the bytes. Not cancel-safe.
    pub(crate) async fn write(&mut self, mut bytes: Bytes) -> Result<(), Error> {
        self.flush().await?;
        drain(&mut self.half, &mut bytes, self.within).await
    }
}

/// Writes until the buffer is empty, as long as some of it is taken every `within`.
async fn drain(half: &mut WriteHalf<Stream>, bytes: &mut impl Buf, within: Duration) -> Result<(), Error> {
    while bytes.has_remaining() {
        let written = timeout(within, half.write_buf(bytes)).await;
        if written.map_err(|_| Error::Slow("it takes no bytes"))?? == 0 {
            return Err(Error::Closed);
        }
    }
    Ok(())
}
