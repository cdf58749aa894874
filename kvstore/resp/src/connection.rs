//! One connection: read, start commands, answer in order, write.
//!
//! The loop starts every command that can be started, then waits for the first of: a command finishes, the
//! client takes bytes, the client sends bytes. It does not read while a complete command waits for its turn,
//! and starts none while [`RespConfig::buffered_bytes_max`](crate::RespConfig) is used up: a client that does
//! not read its answers is slowed down first and closed in the end.
//!
//! Long arguments, and short ones when there are many, are charged to a budget that all connections share, as
//! their bytes come. Connections that each hold a share and wait for more could wait for each other: so one
//! command at a time may go beyond the budget, and the waiting commands finish one by one. A command that waits
//! for [`CHARGE_WAIT`] is given up: its share is returned, the rest of its bytes are skipped, and it is
//! answered with `TRYAGAIN`. A connection that holds a share must be at least as fast as
//! [`RATE_MIN`](crate::stall_detector::RATE_MIN).
//!
//! A line of an HTTP request closes the connection at once: a page in a browser could carry commands in its body.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::{Buf, BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{AcquireError, SemaphorePermit, watch};
use tokio::time::{Instant, sleep, timeout_at};

use crate::admission::{Admission, Size};
use crate::execute::execute;
use crate::metrics::RespCounters;
use crate::output::Output;
use crate::reply::Reply;
use crate::running_commands::{Claims, RunningCommands};
use crate::server::{CHARGE_BYTES, Shared};
use crate::session::{Dispatch, Session};
use crate::stall_detector::StallDetector;
use crate::values::Values;
use crate::wire::{READ_BYTES, ReadLimit, RequestParser, SHORT_MAX, WireError};

/// Minimum free space of the buffer for a read.
const READ_BYTES_MIN: usize = 4 << 10;

/// Maximum time that a command waits for the common budget.
const CHARGE_WAIT: Duration = Duration::from_secs(3);

/// Reason why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionEnd {
    /// By the client, by a limit, or because the server stops.
    Closed,
    /// The client spoke HTTP.
    CrossProtocol,
}

/// Share of the common budget, held by a command from its first long argument to its answer.
#[derive(Default)]
struct Charge<'a> {
    /// Permits taken from the budget.
    paid: Option<SemaphorePermit<'a>>,
    /// Held by the one command that may exceed the budget; it takes no further permits.
    over_budget: Option<SemaphorePermit<'a>>,
}

/// Serves a connection until the client leaves, violates the protocol or stalls, or the server stops.
pub(crate) async fn serve<V: Values>(
    shared: &Shared<V>,
    reader: impl AsyncRead + Unpin,
    mut writer: impl AsyncWrite + Unpin,
    mut stop: watch::Receiver<bool>,
    id: u64,
) -> io::Result<ConnectionEnd> {
    let config = &shared.config;
    let mut session = Session::new(id, config.password.is_none());
    let mut input = Input::new(reader, RequestParser::new(session.limits(config.limits())));
    let mut output = Output::default();
    let admission = Admission::new(config.buffered_bytes_max);
    let mut running_commands = RunningCommands::new(config.pipeline_max);
    let mut quiet = StallDetector::default();
    // Bytes of the arguments of running commands.
    let mut held = 0;
    let mut charge = Charge::default();
    // Start of the wait for the budget, and whether the wait timed out.
    let mut short_since: Option<Instant> = None;
    let mut given_up = false;
    let mut waiting: Option<Dispatch> = None;
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
            while let Some(((reply, size), (bytes, paid))) = running_commands.pop() {
                held -= bytes;
                admission.release(size);
                drop::<Charge<'_>>(paid);
                answer(shared, &session, &mut output, &reply);
                quiet.mark_server_delay();
            }
            if waiting.is_none() && fault.is_none() && !session.closing {
                match input.parser.next(&mut input.buffer) {
                    Ok(None) => {}
                    Ok(Some(_)) if given_up => {
                        given_up = false;
                        RespCounters::add(&shared.counters.throttled, 1);
                        let text = "TRYAGAIN too many large values are being received at the moment";
                        waiting = Some(Dispatch::Answer(Reply::error(text)));
                    }
                    Ok(Some(command)) => waiting = Some(session.recognise(&shared.names, command)),
                    Err(error) => fault = Some(error),
                }
            }
            // An answer may be longer than its reservation.
            let excess = |(reply, size): &(Reply, Size)| reply.bytes().saturating_sub(size.bytes);
            let finished = running_commands.finished().map(excess).sum::<usize>();
            let buffered = held + output.remaining() + admission.reserved() + finished;
            admission.unsent(output.remaining());
            let full = (!running_commands.is_empty() || output.has_remaining())
                && buffered >= config.buffered_bytes_max;
            match waiting.take() {
                None => break,
                // The lines that follow are the HTTP request's too and must not be carried out.
                Some(Dispatch::CrossProtocol) => {
                    RespCounters::add(&shared.counters.connections_cross_protocol, 1);
                    return Ok(ConnectionEnd::CrossProtocol);
                }
                Some(Dispatch::Stored(specification, command)) => {
                    let claims = Claims::of(specification, &command.arguments, &shared.hasher);
                    if full || !running_commands.admits(&claims) {
                        waiting = Some(Dispatch::Stored(specification, command));
                        break;
                    }
                    let bytes = command.bytes;
                    held += bytes;
                    let future = execute(shared, specification, command, &admission);
                    let mut start = Some((future, claims, (bytes, std::mem::take(&mut charge))));
                    poll_fn(|context| {
                        if let Some((future, claims, tag)) = start.take() {
                            running_commands.start(context, future, claims, tag);
                        }
                        Poll::Ready(())
                    })
                    .await;
                }
                Some(next) if !running_commands.is_empty() || full => {
                    waiting = Some(next);
                    break;
                }
                Some(Dispatch::Answer(reply)) => {
                    answer(shared, &session, &mut output, &reply);
                    charge = Charge::default();
                }
                Some(Dispatch::Session(specification, command)) => {
                    // `HELLO` and `RESET` are answered in the version that they choose.
                    let reply = session.answer(shared, specification, command);
                    answer(shared, &session, &mut output, &reply);
                    input.parser.limit(session.limits(config.limits()));
                    charge = Charge::default();
                }
            }
        }

        if let Some(error) = fault
            && running_commands.is_empty()
            && !session.closing
        {
            answer(shared, &session, &mut output, &Reply::error(format!("ERR {error}")));
            session.closing = true;
        }
        if session.closing && waiting.is_none() && running_commands.is_empty() && !output.has_remaining() {
            return writer.shutdown().await.map(|()| ConnectionEnd::Closed);
        }

        let reading = waiting.is_none() && fault.is_none() && !session.closing;
        let mut missing_units = charge.missing_units(&input.parser);
        if reading
            && missing_units > 0
            && let Ok(permit) = shared.received.try_acquire_many(missing_units)
        {
            if !charge.is_some() {
                // From here on the connection must keep up [`RATE_MIN`](crate::stall_detector::RATE_MIN).
                quiet.mark_server_delay();
            }
            charge.add_permits(permit);
            missing_units = 0;
        }
        if missing_units == 0 {
            short_since = None;
        }
        let mut short_until = || *short_since.get_or_insert_with(Instant::now) + CHARGE_WAIT;
        tokio::select! {
            biased;
            () = poll_fn(|context| {
                admission.begin_pass();
                running_commands.poll(context)
            }), if !running_commands.is_empty() => {}
            written = writer.write_buf(&mut output), if output.has_remaining() => {
                let written = written?;
                if written == 0 {
                    return Err(io::ErrorKind::WriteZero.into());
                }
                RespCounters::add(&shared.counters.bytes_sent, written);
                quiet.moved(written);
            }
            permit = async { timeout_at(short_until(), permit(shared, missing_units)).await },
                if reading && missing_units > 0 =>
            {
                match permit {
                    Ok(Ok(Permit::Paid(permit))) => charge.add_permits(permit),
                    Ok(Ok(Permit::Beyond(permit))) => charge.over_budget = Some(permit),
                    // The semaphores are never closed.
                    Ok(Err(_)) => return Ok(ConnectionEnd::Closed),
                    Err(_) => {
                        input.parser.abandon();
                        given_up = true;
                        charge = Charge::default();
                    }
                }
                // The client could not send during the wait.
                quiet.mark_server_delay();
            }
            read = input.read(), if reading && missing_units == 0 => {
                let read = read?;
                // A client that has closed its sending side may still want its answers.
                session.closing |= read == 0;
                RespCounters::add(&shared.counters.bytes_received, read);
                quiet.moved(read);
            }
            _ = &mut stopping, if !session.closing => session.closing = true,
            () = &mut alarm => {
                let owing = output.has_remaining() || (reading && input.parser.inside());
                let limit = match owing {
                    true => config.stall_timeout,
                    false if running_commands.is_empty() => config.idle_timeout,
                    // The store is slow; the client is not to blame.
                    false => Duration::ZERO,
                };
                let slow_limit = (owing && charge.is_some()).then_some(config.stall_timeout);
                if quiet.tick(pace, limit, slow_limit) {
                    RespCounters::add(&shared.counters.connections_stalled, 1);
                    tracing::debug!(id, owing, "closed a stalled connection");
                    return Ok(ConnectionEnd::Closed);
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

enum Permit<'a> {
    Paid(SemaphorePermit<'a>),
    Beyond(SemaphorePermit<'a>),
}

/// Waits for permits of the common budget, or for the one permit to exceed it.
async fn permit<V>(shared: &Shared<V>, units: u32) -> Result<Permit<'_>, AcquireError> {
    tokio::select! {
        biased;
        permit = shared.received.acquire_many(units) => permit.map(Permit::Paid),
        permit = shared.over_budget.acquire() => permit.map(Permit::Beyond),
    }
}

impl<'a> Charge<'a> {
    fn add_permits(&mut self, permit: SemaphorePermit<'a>) {
        match &mut self.paid {
            Some(paid) => paid.merge(permit),
            none => *none = Some(permit),
        }
    }

    fn is_some(&self) -> bool {
        self.paid.is_some() || self.over_budget.is_some()
    }

    /// Units of [`CHARGE_BYTES`] that the command in progress still has to take from the common budget.
    fn missing_units(&self, parser: &RequestParser) -> u32 {
        if self.over_budget.is_some() {
            return 0;
        }
        let needed = parser.charged_bytes().div_ceil(CHARGE_BYTES);
        let has = self.paid.as_ref().map_or(0, SemaphorePermit::num_permits);
        // At most the largest command, which is far less than 2^32 units.
        u32::try_from(needed.saturating_sub(has)).unwrap_or(u32::MAX)
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

    /// Reads once, into as much room as the parser wants. Cancel safe: no bytes are lost when the future is
    /// dropped.
    async fn read(&mut self) -> io::Result<usize> {
        match self.parser.room(self.buffer.len()) {
            ReadLimit::Any => {
                if self.buffer.capacity() - self.buffer.len() < READ_BYTES_MIN {
                    self.buffer.reserve(READ_BYTES.max(SHORT_MAX));
                }
                self.reader.read_buf(&mut self.buffer).await
            }
            ReadLimit::AtMost(room) => {
                self.buffer.reserve(room);
                self.reader.read_buf(&mut (&mut self.buffer).limit(room)).await
            }
        }
    }
}
