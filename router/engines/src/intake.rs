//! Request bodies on their way into an engine's HTTP server: a limit on each one's length and time, and on the bytes of all
//! of them together.
//!
//! Received bytes count, not announced ones, so that a client takes room only by sending. The charge of a body is returned
//! when its [`ReceivedBody`] is dropped, which is after it was parsed. A body that does not fit is refused at once: a client
//! that has begun to send cannot be made to wait without holding what it sent.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes that one permit of the budget stands for.
const UNIT_BYTES: usize = 1024;

/// Reason for which a body was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IntakeError {
    /// The body is longer than the limit.
    #[error("the body is too large")]
    TooLarge,
    /// Other bodies use the whole budget.
    #[error("too many bytes of requests are being received")]
    Full,
    /// The body was not complete in time.
    #[error("the body did not arrive in time")]
    Slow,
    /// The connection broke, or the body is malformed.
    #[error("the connection closed before the request body was complete")]
    Broken,
}

/// A whole body, charged to its [`Intake`] until it is dropped.
#[derive(Debug)]
pub struct ReceivedBody {
    /// Bytes of the body.
    pub bytes: Bytes,
    _charge: Option<OwnedSemaphorePermit>,
}

/// Receives the request bodies of one server.
#[derive(Debug)]
pub struct Intake {
    units: Arc<Semaphore>,
    body_bytes_max: usize,
    within: Duration,
}

impl Intake {
    /// Limits one body to `body_bytes_max` bytes and the time `within`, and all of them together to `received_bytes_max` bytes
    /// (at least one largest body).
    #[must_use]
    pub fn new(body_bytes_max: usize, received_bytes_max: usize, within: Duration) -> Self {
        let units = received_bytes_max.max(body_bytes_max).div_ceil(UNIT_BYTES);
        Self { units: Arc::new(Semaphore::new(units.min(Semaphore::MAX_PERMITS))), body_bytes_max, within }
    }

    /// Length limit of one body.
    #[must_use]
    pub fn body_bytes_max(&self) -> usize {
        self.body_bytes_max
    }

    /// Receives a whole body. A body that comes in one piece is not copied.
    pub async fn receive<B>(&self, body: B) -> Result<ReceivedBody, IntakeError>
    where
        B: Body<Data = Bytes>,
    {
        if body.size_hint().lower() > self.body_bytes_max as u64 {
            return Err(IntakeError::TooLarge);
        }
        tokio::time::timeout(self.within, self.collect(body)).await.unwrap_or(Err(IntakeError::Slow))
    }

    async fn collect<B>(&self, body: B) -> Result<ReceivedBody, IntakeError>
    where
        B: Body<Data = Bytes>,
    {
        let mut body = pin!(body);
        let mut charge: Option<OwnedSemaphorePermit> = None;
        let (mut first, mut rest) = (Bytes::new(), BytesMut::new());
        while let Some(frame) = body.frame().await {
            let Ok(piece) = frame.map_err(|_| IntakeError::Broken)?.into_data() else { continue };
            let bytes = first.len() + rest.len() + piece.len();
            if bytes > self.body_bytes_max {
                return Err(IntakeError::TooLarge);
            }
            let paid = charge.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            let more = self.take(bytes.div_ceil(UNIT_BYTES) - paid)?;
            match &mut charge {
                Some(charge) => charge.merge(more),
                none => *none = Some(more),
            }
            if first.is_empty() && rest.is_empty() {
                first = piece;
                continue;
            }
            if rest.is_empty() {
                rest.extend_from_slice(&std::mem::take(&mut first));
            }
            rest.extend_from_slice(&piece);
        }
        let bytes = if rest.is_empty() { first } else { rest.freeze() };
        Ok(ReceivedBody { bytes, _charge: charge })
    }

    fn take(&self, units: usize) -> Result<OwnedSemaphorePermit, IntakeError> {
        let units = u32::try_from(units).map_err(|_| IntakeError::Full)?;
        Arc::clone(&self.units).try_acquire_many_owned(units).map_err(|_| IntakeError::Full)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream::{self, StreamExt};
    use http_body::Frame;
    use http_body_util::{Full, StreamBody};

    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    fn pieces(pieces: &[usize]) -> impl Body<Data = Bytes> + use<> {
        let frames: Vec<_> = (pieces.iter())
            .map(|len| Ok::<_, Infallible>(Frame::data(Bytes::from(vec![b'x'; *len]))))
            .collect();
        StreamBody::new(stream::iter(frames))
    }

    #[tokio::test]
    async fn bodies_come_whole_and_too_long_ones_do_not() {
        let intake = Intake::new(1000, 4096, SOON);
        for lengths in [&[][..], &[0], &[1000], &[1, 0, 999], &[300, 300, 300]] {
            let body = intake.receive(pieces(lengths)).await.expect("it fits");
            assert_eq!(body.bytes, vec![b'x'; lengths.iter().sum()], "{lengths:?}");
        }
        for lengths in [&[1001][..], &[500, 501], &[1000, 1]] {
            assert_eq!(intake.receive(pieces(lengths)).await.expect_err("too long"), IntakeError::TooLarge);
        }
        // The length is known before a byte has arrived.
        let told = intake.receive(Full::new(Bytes::from(vec![0; 1001]))).await;
        assert_eq!(told.expect_err("too long"), IntakeError::TooLarge);
        assert_eq!(intake.units.available_permits(), 4);
    }

    #[tokio::test]
    async fn bodies_share_one_budget_until_they_are_dropped() {
        let intake = Intake::new(3000, 4000, SOON);
        let held = intake.receive(pieces(&[1500, 1400])).await.expect("it fits");
        assert_eq!(intake.receive(pieces(&[1000, 1000])).await.expect_err("no room"), IntakeError::Full);
        drop(intake.receive(pieces(&[1000])).await.expect("a small one fits"));
        drop(held);
        drop(intake.receive(pieces(&[1000, 1000])).await.expect("there is room again"));
    }

    #[tokio::test]
    async fn half_a_body_is_given_up_after_its_time() {
        let intake = Intake::new(3000, 4000, Duration::from_millis(20));
        let half = stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"{")))]);
        let body = StreamBody::new(half.chain(stream::pending()));
        assert_eq!(intake.receive(body).await.expect_err("never whole"), IntakeError::Slow);
        assert_eq!(intake.units.available_permits(), 4);
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_no_body() {
        let intake = Intake::new(3000, 4000, SOON);
        let frames = [Ok(Frame::data(Bytes::from_static(b"{"))), Err(std::io::Error::other("reset"))];
        let broken = intake.receive(StreamBody::new(stream::iter(frames))).await;
        assert_eq!(broken.expect_err("half"), IntakeError::Broken);
    }
}
