//! Reception of messages: limits on each message's length and time, and on the bytes of all calls together.
//!
//! tonic reserves the announced length of a message and waits for its bytes without a time limit: 1,024
//! connections of 64 calls could make it hold 1 TiB. An [`Intake`] stands before it. It keeps the received
//! part of a message, charges it to a [`Budget`] as it arrives, and passes on whole messages only, so that
//! no memory is reserved for bytes that have not arrived. A call that finds the budget used up ends with
//! RESOURCE_EXHAUSTED; one whose message takes too long ends with DEADLINE_EXCEEDED.
//!
//! The clock of a message starts when its beginning has arrived and more is polled for: a stream whose
//! requests wait for earlier ones is not read meanwhile, and its clock does not run. A unary call must also
//! end its side within the same time.
//!
//! Source: "gRPC over HTTP2", Length-Prefixed-Message: a byte of flags, four bytes of length, big-endian, the message.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame};
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};
use tonic::Status;

use crate::error::Error;

/// Bytes in front of each message.
const PREFIX_BYTES: usize = 5;
/// Bytes per permit of the budget.
const UNIT_BYTES: usize = 1024;

/// Limit on the bytes of requests that all calls together hold: messages being received, and those that
/// wait for their answers.
#[derive(Debug)]
pub(crate) struct Budget(Arc<Semaphore>);

impl Budget {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self(Arc::new(Semaphore::new(bytes_max.div_ceil(UNIT_BYTES).min(Semaphore::MAX_PERMITS))))
    }

    fn take(&self, units: usize) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.0).try_acquire_many_owned(u32::try_from(units).ok()?).ok()
    }

    /// Charges a request for as long as the permit lives.
    pub(crate) fn hold(&self, request: &impl Message) -> Result<OwnedSemaphorePermit, Error> {
        self.take(request.encoded_len().div_ceil(UNIT_BYTES)).ok_or(Error::Overloaded)
    }
}

/// Limits of an [`Intake`].
#[derive(Debug)]
pub(crate) struct IntakeLimits {
    pub(crate) budget: Arc<Budget>,
    pub(crate) message_bytes_max: usize,
    pub(crate) within: Duration,
    /// Whether several messages may arrive, with any time between them.
    pub(crate) is_stream: bool,
}

/// The body of a call, message by message.
pub(crate) struct Intake<B> {
    body: B,
    rules: IntakeLimits,
    /// Whole messages with their prefixes; of one frame at most.
    whole: VecDeque<Bytes>,
    /// Received part of the next message.
    coming: BytesMut,
    /// Permits of the budget for `coming`.
    charge: Option<OwnedSemaphorePermit>,
    clock: Option<Pin<Box<Sleep>>>,
    has_ended: bool,
}

/// Returns the length of the message that begins here, once its prefix has arrived.
fn announced(bytes: &[u8]) -> Option<usize> {
    let [_, a, b, c, d] = *bytes.first_chunk::<PREFIX_BYTES>()?;
    Some(u32::from_be_bytes([a, b, c, d]) as usize)
}

impl<B> Intake<B> {
    pub(crate) fn new(body: B, rules: IntakeLimits) -> Self {
        Self {
            body,
            rules,
            whole: VecDeque::new(),
            coming: BytesMut::new(),
            charge: None,
            clock: None,
            has_ended: false,
        }
    }

    /// Takes received bytes.
    fn take(&mut self, mut data: Bytes) -> Result<(), Status> {
        while !data.is_empty() {
            if self.coming.is_empty()
                && let Some(len) = self.checked(&data)?
                && data.len() - PREFIX_BYTES >= len
            {
                // The common case, without a copy.
                self.whole.push_back(data.split_to(PREFIX_BYTES + len));
                self.message_ended();
                continue;
            }
            let needed = self.checked(&self.coming)?.map_or(PREFIX_BYTES, |len| PREFIX_BYTES + len);
            let part = data.split_to((needed - self.coming.len()).min(data.len()));
            self.pay(self.coming.len() + part.len())?;
            self.coming.extend_from_slice(&part);
            let whole = self.checked(&self.coming)?.map(|len| PREFIX_BYTES + len);
            if whole == Some(self.coming.len()) {
                self.emit_message();
            }
        }
        Ok(())
    }

    /// Returns the length as [`announced`]; an error when it exceeds the limit.
    fn checked(&self, bytes: &[u8]) -> Result<Option<usize>, Status> {
        let (len, limit) = (announced(bytes), self.rules.message_bytes_max);
        match len.filter(|&len| len > limit) {
            None => Ok(len),
            Some(len) => Err(Status::out_of_range(format!(
                "the message has {len} bytes, and the limit is {limit} bytes"
            ))),
        }
    }

    /// Raises the charge of the message being received to this many bytes in all.
    fn pay(&mut self, bytes: usize) -> Result<(), Status> {
        let paid = self.charge.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let units = bytes.div_ceil(UNIT_BYTES) - paid;
        if units == 0 {
            return Ok(());
        }
        let more = self.rules.budget.take(units).ok_or(Error::Overloaded)?;
        match &mut self.charge {
            Some(charge) => charge.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }

    /// Passes on the received bytes as a message: a whole one, or what there is at the end of the call.
    fn emit_message(&mut self) {
        self.whole.push_back(self.coming.split().freeze());
        // The buffer's memory moves with the message.
        self.coming = BytesMut::new();
        self.charge = None;
        self.message_ended();
    }

    fn message_ended(&mut self) {
        if self.rules.is_stream {
            self.clock = None;
        }
    }

    /// No data is available: checks the time limit.
    fn wait(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        if self.rules.is_stream && self.coming.is_empty() {
            return Poll::Pending;
        }
        let within = self.rules.within;
        let clock = self.clock.get_or_insert_with(|| Box::pin(sleep(within)));
        clock.as_mut().poll(context).map(|()| {
            Status::deadline_exceeded(format!("the message did not come within {} ms", within.as_millis()))
        })
    }
}

impl<B> Body for Intake<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            if let Some(message) = this.whole.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(message))));
            }
            if this.has_ended {
                return Poll::Ready(None);
            }
            match Pin::new(&mut this.body).poll_frame(context) {
                Poll::Pending => return this.wait(context).map(|late| Some(Err(late))),
                Poll::Ready(Some(Err(error))) => {
                    return Poll::Ready(Some(Err(Status::from_error(error.into()))));
                }
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => this.take(data)?,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Poll::Ready(None) => {
                    this.has_ended = true;
                    if !this.coming.is_empty() {
                        // tonic reports the error of an incomplete message.
                        this.emit_message();
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use futures_util::stream;
    use http_body_util::StreamBody;

    use super::*;

    fn message(len: usize) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.extend((len as u32).to_be_bytes());
        bytes.extend((0..len).map(|at| at as u8));
        bytes
    }

    fn rules(budget: &Arc<Budget>) -> IntakeLimits {
        IntakeLimits {
            budget: Arc::clone(budget),
            message_bytes_max: 4096,
            within: Duration::from_secs(3600),
            is_stream: true,
        }
    }

    /// Returns the messages that these pieces yield, and the result at the end.
    fn through(budget: &Arc<Budget>, pieces: &[&[u8]]) -> (Vec<Bytes>, Result<(), Status>) {
        let frames = pieces.iter().map(|piece| Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(piece))));
        let body = StreamBody::new(stream::iter(frames.collect::<Vec<_>>()));
        let mut intake = Intake::new(body, rules(budget));
        let mut out = Vec::new();
        loop {
            match Pin::new(&mut intake).poll_frame(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(Some(Ok(frame))) => out.push(frame.into_data().expect("data")),
                Poll::Ready(Some(Err(status))) => return (out, Err(status)),
                Poll::Ready(None) => return (out, Ok(())),
                Poll::Pending => panic!("nothing is waited for"),
            }
        }
    }

    #[test]
    fn messages_come_out_whole_however_they_are_cut() {
        let budget = Arc::new(Budget::new(8192));
        let lengths = [0, 1, 4096, 7, 0, 2000];
        let all: Vec<u8> = lengths.iter().flat_map(|&len| message(len)).collect();
        for cut in [1, 2, 5, 6, 1000, all.len()] {
            let (out, ended) = through(&budget, &all.chunks(cut).collect::<Vec<_>>());
            assert!(ended.is_ok());
            let wanted: Vec<Vec<u8>> = lengths.iter().map(|&len| message(len)).collect();
            assert_eq!(out, wanted, "cuts of {cut}");
        }
        let cut_off = &message(100)[..50];
        let (out, ended) = through(&budget, &[cut_off]);
        assert!(ended.is_ok() && out == [cut_off], "half a message is for tonic to judge");
        assert_eq!(budget.0.available_permits(), 8, "everything was given back");
    }

    #[test]
    fn an_announced_length_takes_nothing_and_one_beyond_the_limit_is_refused() {
        let budget = Arc::new(Budget::new(8192));
        for len in [4097_u32, u32::MAX] {
            let mut lying = vec![0];
            lying.extend(len.to_be_bytes());
            for cut in [1, 5] {
                let (out, ended) = through(&budget, &lying.chunks(cut).collect::<Vec<_>>());
                assert_eq!((out.len(), ended.expect_err("too large").code()), (0, tonic::Code::OutOfRange));
            }
        }
        let frames = [Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(&message(4096)[..10])))];
        let mut intake = Intake::new(StreamBody::new(stream::iter(frames)), rules(&budget));
        let first = intake.take(Bytes::copy_from_slice(&message(4096)[..10]));
        assert!(first.is_ok() && intake.coming.capacity() < 1024, "{}", intake.coming.capacity());
        assert_eq!(budget.0.available_permits(), 7);
        drop(intake);
        assert_eq!(budget.0.available_permits(), 8);
    }

    #[test]
    fn what_comes_is_charged_and_a_spent_budget_ends_the_call() {
        let budget = Arc::new(Budget::new(4096));
        let others = budget.take(3).expect("room");
        let long = message(3000);
        let (out, ended) = through(&budget, &[&long[..500], &long[500..]]);
        assert_eq!((out.len(), ended.expect_err("no room").code()), (0, tonic::Code::ResourceExhausted));
        assert_eq!(budget.0.available_permits(), 1);
        drop(others);
        assert!(through(&budget, &[&long[..500], &long[500..]]).1.is_ok());
    }
}
