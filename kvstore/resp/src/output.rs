//! Output buffer of a connection.
//!
//! Short bytes are collected in one buffer; long pieces are queued as they are, so that a value is sent without
//! being copied. [`Output`] is a [`Buf`], which tokio writes with one `writev` for up to 64 parts.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Pieces up to this length are copied: a copy of 4 KiB costs less than another part of a `writev`.
const COPY_MAX: usize = 8 << 10;

/// Bytes that wait to be written.
#[derive(Debug, Default)]
pub(crate) struct Output {
    queue: VecDeque<Bytes>,
    queued: usize,
    /// Bytes after those in `queue`.
    tail: BytesMut,
}

impl Output {
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.tail.put_slice(bytes);
    }

    pub(crate) fn put_piece(&mut self, piece: &Bytes) {
        if piece.len() <= COPY_MAX {
            return self.put(piece);
        }
        if !self.tail.is_empty() {
            self.queued += self.tail.len();
            self.queue.push_back(self.tail.split().freeze());
        }
        self.queued += piece.len();
        self.queue.push_back(piece.clone());
    }

    /// A type byte, a number and the end of a line.
    pub(crate) fn put_number(&mut self, kind: u8, number: i64) {
        let mut line = [0; 23];
        let mut at = line.len() - 2;
        line[at..].copy_from_slice(b"\r\n");
        let mut rest = number.unsigned_abs();
        loop {
            at -= 1;
            // One decimal digit.
            line[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        if number < 0 {
            at -= 1;
            line[at] = b'-';
        }
        self.tail.put_u8(kind);
        self.put(&line[at..]);
    }
}

impl Buf for Output {
    fn remaining(&self) -> usize {
        self.queued + self.tail.len()
    }

    fn chunk(&self) -> &[u8] {
        self.queue.front().map_or(&self.tail[..], |piece| &piece[..])
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let parts = self.queue.iter().map(|piece| &piece[..]).chain(Some(&self.tail[..]));
        let parts = parts.filter(|part| !part.is_empty());
        slices.iter_mut().zip(parts).map(|(slice, part)| *slice = IoSlice::new(part)).count()
    }

    fn advance(&mut self, mut count: usize) {
        while let Some(piece) = self.queue.front_mut() {
            if count < piece.len() {
                self.queued -= count;
                return piece.advance(count);
            }
            count -= piece.len();
            self.queued -= piece.len();
            self.queue.pop_front();
        }
        self.tail.advance(count);
        if self.tail.is_empty() {
            // Reclaims the space at the front without moving bytes.
            self.tail.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_in_order_whatever_is_written_at_a_time() {
        for step in [1, 3, 100, 9000, 1 << 20] {
            let mut output = Output::default();
            let mut expected = Vec::new();
            let piece = Bytes::from(vec![b'p'; COPY_MAX + 1]);
            for number in [0, -1, i64::MIN, i64::MAX, 42] {
                output.put_number(b':', number);
                expected.extend(format!(":{number}\r\n").bytes());
                output.put_piece(&piece);
                output.put_piece(&piece.slice(..10));
                expected.extend(&piece);
                expected.extend(&piece[..10]);
            }
            assert_eq!(output.remaining(), expected.len());
            let mut slices = [IoSlice::new(&[]); 64];
            let filled = output.chunks_vectored(&mut slices);
            let seen: Vec<u8> = slices[..filled].iter().flat_map(|slice| slice.to_vec()).collect();
            assert!(seen == expected, "the parts of a writev are all there");
            let mut written = Vec::new();
            while output.has_remaining() {
                let now = step.min(output.chunk().len());
                written.extend_from_slice(&output.chunk()[..now]);
                output.advance(now);
            }
            assert!(written == expected, "steps of {step}");
        }
    }
}
