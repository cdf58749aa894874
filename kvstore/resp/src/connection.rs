//! One connection: read, start commands, answer in order, write.
//!
//! The loop starts whatever can be started, then waits for the first of: a command finishes, the client takes
//! bytes, the client sends bytes. It does not read while a complete command waits for its turn, and starts none while
//! [`RespConfig::buffered_bytes_max`](crate::RespConfig) is used up: a client that does not read its answers is
//! slowed down first and closed in the end.
//!
//! Time is counted without a clock per operation: an alarm rings at a fixed pace and looks whether anything has moved
//! since. A connection is closed after one to two times its limit of standing still.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::{Buf, BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{SemaphorePermit, watch};
use tokio::time::{Instant, sleep};

use crate::execute::execute;
use crate::lanes::{Claims, Lanes};
use crate::metrics::RespCounters;
use crate::output::Output;
use crate::reply::Reply;
use crate::server::{CHARGE_BYTES, Shared};
use crate::session::{Next, Session};
use crate::values::Values;
use crate::wire::{READ_BYTES, RequestParser, Room, SHORT_MAX, WireError};

/// Room that is worth a read.
const READ_BYTES_MIN: usize = 4 << 10;

/// Held by a command from its first long argument to its answer.
type Charge<'a> = Option<SemaphorePermit<'a>>;

/// Serves a connection until the client leaves, breaks the protocol or stands still, or the server stops.
pub(crate) async fn serve<V: Values>(
    shared: &Shared<V>,
    reader: impl AsyncRead + Unpin,
    mut writer: impl AsyncWrite + Unpin,
    mut stop: watch::Receiver<bool>,
    id: u64,
) -> io::Result<()> {
    let config = &shared.config;
    let mut session = Session::new(id, config.password.is_none());
    let mut input = Input::new(reader, RequestParser::new(session.limits(config.limits())));
    let mut output = Output::default();
    let mut lanes = Lanes::new(config.pipeline_max);
    let mut quiet = Quiet::default();
    // Bytes of the arguments that running commands hold.
    let mut held = 0;
    let mut charge: Charge<'_> = None;
    let mut waiting: Option<Next> = None;
    let mut fault: Option<WireError> = None;

    let pace = if config.idle_timeout.is_zero() {
        config.stall_timeout
    } else {
        config.stall_timeout.min(config.idle_timeout)
    };
    let mut alarm = pin!(sleep(pace));
    let stopping = stop.wait_for(|stop| *stop);
    let mut stopping = pin!(stopping);

    loop {
        loop {
            while let Some((reply, (bytes, paid))) = lanes.pop() {
                held -= bytes;
                let _: Charge<'_> = paid;
                answer(shared, &session, &mut output, &reply);
                quiet.moved();
            }
            if waiting.is_none() && fault.is_none() && !session.closing {
                match input.parser.next(&mut input.buffer) {
                    Ok(command) => waiting = command.map(|command| session.recognise(command)),
                    Err(error) => fault = Some(error),
                }
            }
            let buffered = held + output.remaining() + lanes.finished().map(Reply::bytes).sum::<usize>();
            let full = (!lanes.is_empty() || output.has_remaining()) && buffered >= config.buffered_bytes_max;
            match waiting.take() {
                None => break,
                Some(Next::Stored(specification, command)) => {
                    let claims = Claims::of(specification, &command.arguments, &shared.hasher);
                    if full || !lanes.admits(&claims) {
                        waiting = Some(Next::Stored(specification, command));
                        break;
                    }
                    let bytes = command.bytes;
                    held += bytes;
                    let future = execute(shared, specification, command);
                    let mut start = Some((future, claims, (bytes, charge.take())));
                    poll_fn(|context| {
                        if let Some((future, claims, tag)) = start.take() {
                            lanes.start(context, future, claims, tag);
                        }
                        Poll::Ready(())
                    })
                    .await;
                }
                Some(next) if !lanes.is_empty() || full => {
                    waiting = Some(next);
                    break;
                }
                Some(Next::Answer(reply)) => answer(shared, &session, &mut output, &reply),
                Some(Next::Session(specification, command)) => {
                    // `HELLO` and `RESET` are answered in the version that they choose.
                    let reply = session.answer(shared, specification, command);
                    answer(shared, &session, &mut output, &reply);
                    input.parser.limit(session.limits(config.limits()));
                    charge = None;
                }
            }
        }

        if let Some(error) = fault
            && lanes.is_empty()
            && !session.closing
        {
            answer(shared, &session, &mut output, &Reply::error(format!("ERR {error}")));
            session.closing = true;
        }
        if session.closing && waiting.is_none() && lanes.is_empty() && !output.has_remaining() {
            return writer.shutdown().await;
        }

        let reading = waiting.is_none() && fault.is_none() && !session.closing;
        let lacking = lacking(&input.parser, charge.as_ref());
        tokio::select! {
            biased;
            () = poll_fn(|context| lanes.poll(context)), if !lanes.is_empty() => {}
            written = writer.write_buf(&mut output), if output.has_remaining() => {
                let written = written?;
                if written == 0 {
                    return Err(io::ErrorKind::WriteZero.into());
                }
                RespCounters::add(&shared.counters.bytes_sent, written);
                quiet.moved();
            }
            permit = shared.received.acquire_many(lacking), if reading && lacking > 0 => {
                match (permit, &mut charge) {
                    (Ok(permit), Some(charge)) => charge.merge(permit),
                    (Ok(permit), none) => *none = Some(permit),
                    // The semaphore is never closed.
                    (Err(_), _) => return Ok(()),
                }
            }
            read = input.read(), if reading && lacking == 0 => {
                let read = read?;
                // A client that has said all may still want its answers.
                session.closing |= read == 0;
                RespCounters::add(&shared.counters.bytes_received, read);
                quiet.moved();
            }
            _ = &mut stopping, if !session.closing => session.closing = true,
            () = &mut alarm => {
                let owing = output.has_remaining() || (reading && input.parser.inside());
                let limit = match owing {
                    true => config.stall_timeout,
                    false if lanes.is_empty() => config.idle_timeout,
                    // The store is slow, which is not the client's fault.
                    false => Duration::ZERO,
                };
                if quiet.rang(pace, limit) {
                    RespCounters::add(&shared.counters.connections_stalled, 1);
                    tracing::debug!(id, owing, "closed a connection that stands still");
                    return Ok(());
                }
                alarm.as_mut().reset(Instant::now() + pace);
            }
        }
    }
}

fn answer<V>(shared: &Shared<V>, session: &Session, output: &mut Output, reply: &Reply) {
    RespCounters::add(&shared.counters.commands, 1);
    if matches!(reply, Reply::Error(_)) {
        RespCounters::add(&shared.counters.errors, 1);
    }
    reply.encode(session.protocol, output);
}

/// How much of the common budget the command in progress needs beyond what it has, in units of [`CHARGE_BYTES`].
fn lacking(parser: &RequestParser, charge: Option<&SemaphorePermit<'_>>) -> u32 {
    let needed = parser.long_bytes().div_ceil(CHARGE_BYTES);
    let has = charge.map_or(0, SemaphorePermit::num_permits);
    // At most the largest command, which is far less than 2^32 units.
    u32::try_from(needed.saturating_sub(has)).unwrap_or(u32::MAX)
}

/// How long nothing has moved.
#[derive(Debug, Default)]
struct Quiet {
    moved: bool,
    time: Duration,
}

impl Quiet {
    fn moved(&mut self) {
        self.moved = true;
    }

    /// The alarm rang after `pace`: whether the limit is reached; zero is none.
    fn rang(&mut self, pace: Duration, limit: Duration) -> bool {
        self.time = if std::mem::take(&mut self.moved) { Duration::ZERO } else { self.time + pace };
        !limit.is_zero() && self.time >= limit
    }
}

struct Input<R> {
    reader: R,
    buffer: BytesMut,
    parser: RequestParser,
}

impl<R: AsyncRead + Unpin> Input<R> {
    fn new(reader: R, parser: RequestParser) -> Self {
        Self { reader, buffer: BytesMut::new(), parser }
    }

    /// Reads once, into as much room as the parser wants. Loses nothing when it is dropped before it is ready.
    async fn read(&mut self) -> io::Result<usize> {
        match self.parser.room(self.buffer.len()) {
            Room::Any => {
                if self.buffer.capacity() - self.buffer.len() < READ_BYTES_MIN {
                    self.buffer.reserve(READ_BYTES.max(SHORT_MAX));
                }
                self.reader.read_buf(&mut self.buffer).await
            }
            Room::Exactly(room) => {
                self.buffer.reserve(room);
                self.reader.read_buf(&mut (&mut self.buffer).limit(room)).await
            }
        }
    }
}
