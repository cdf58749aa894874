//! Codec of protocol buffers that counts the fields of a message before it decodes them.
//!
//! A field of two bytes becomes a struct of hundreds, and a packed list of numbers up to eight times its
//! bytes, so a message is counted before it is decoded: one pass over its bytes, without allocation. Only
//! requests for inference have such lists; other messages are small.

use std::any::TypeId;
use std::marker::PhantomData;

use bytes::Buf;
use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

use crate::proto::inference::ModelInferRequest;

/// Largest number of fields of a request, in all its messages.
const FIELDS_MAX: usize = 64 << 10;
/// Largest size of packed numbers, in bytes: shapes, and tensors of types that are not used as inputs.
const PACKED_BYTES_MAX: usize = 1 << 20;

/// Codec whose decoder counts a message first.
#[derive(Debug)]
pub(crate) struct CountingCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for CountingCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for CountingCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = CountingDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::default().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        CountingDecoder(ProstCodec::<T, U>::default().decoder())
    }
}

/// Decoder that refuses messages which would become too large.
#[derive(Debug)]
pub(crate) struct CountingDecoder<U>(ProstDecoder<U>);

impl<U: Message + Default + 'static> Decoder for CountingDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        if TypeId::of::<U>() == TypeId::of::<ModelInferRequest>() {
            // tonic passes a message in one piece.
            let mut count = Count::default();
            count.message(buffer.chunk(), MessageType::Request);
            count.check()?;
        }
        self.0.decode(buffer)
    }
}

/// Type of a message, as far as needed to find its lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MessageType {
    Request,
    /// `InferInputTensor`.
    Input,
    /// `InferTensorContents`.
    Contents,
    /// Parameters, and outputs with their parameters, whose fields are not lists.
    Other,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    fields: usize,
    packed_bytes: usize,
}

impl Count {
    fn check(&self) -> Result<(), Status> {
        if self.fields > FIELDS_MAX {
            return Err(Status::invalid_argument(format!("the request has more than {FIELDS_MAX} fields")));
        }
        if self.packed_bytes > PACKED_BYTES_MAX {
            let message = format!("the request has more than {PACKED_BYTES_MAX} bytes of packed numbers");
            return Err(Status::invalid_argument(message));
        }
        Ok(())
    }

    /// Counts the fields of a message. A malformed field ends the count: the decoder will report it.
    fn message(&mut self, mut bytes: &[u8], place: MessageType) {
        while let Some((tag, rest)) = varint(bytes) {
            self.fields += 1;
            if self.fields > FIELDS_MAX {
                return;
            }
            let skipped = match tag & 7 {
                0 => varint(rest).map(|(_, rest)| rest),
                1 => rest.get(8..),
                2 => varint(rest).and_then(|(length, rest)| {
                    let (inner, rest) = rest.split_at_checked(usize::try_from(length).ok()?)?;
                    self.inner(inner, place, tag >> 3);
                    Some(rest)
                }),
                5 => rest.get(4..),
                // Groups: the decoder skips a group and continues behind it, so its fields are counted with
                // the others.
                3 | 4 => Some(rest),
                _ => None,
            };
            match skipped {
                Some(rest) => bytes = rest,
                None => return,
            }
        }
    }

    fn inner(&mut self, inner: &[u8], place: MessageType, field: u64) {
        match (place, field) {
            (MessageType::Request, 5) => self.message(inner, MessageType::Input),
            (MessageType::Request, 4 | 6) | (MessageType::Input, 4) => {
                self.message(inner, MessageType::Other)
            }
            (MessageType::Input, 5) => self.message(inner, MessageType::Contents),
            (MessageType::Input, 3) | (MessageType::Contents, 1..=7) => self.packed_bytes += inner.len(),
            _ => {}
        }
    }
}

fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0;
    for (at, &byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f).checked_shl(7 * at as u32)?;
        if byte < 0x80 {
            return Some((value, &bytes[at + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use crate::proto::inference::InferTensorContents;
    use crate::proto::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};

    use super::*;

    fn count(request: &ModelInferRequest) -> Count {
        let mut count = Count::default();
        count.message(&request.encode_to_vec(), MessageType::Request);
        count
    }

    fn input(contents: InferTensorContents) -> InferInputTensor {
        InferInputTensor {
            name: "text_input".to_owned(),
            datatype: "BYTES".to_owned(),
            shape: vec![1],
            contents: Some(contents),
            ..InferInputTensor::default()
        }
    }

    #[test]
    fn a_request_is_counted_before_it_is_decoded() {
        // A text of the largest size, in only a few fields.
        let text = InferTensorContents {
            bytes_contents: vec![vec![b'a'; 15 << 20].into()],
            ..InferTensorContents::default()
        };
        let long = ModelInferRequest {
            model_name: "m".to_owned(),
            inputs: vec![input(text)],
            outputs: vec![InferRequestedOutputTensor::default()],
            ..ModelInferRequest::default()
        };
        assert_eq!(count(&long), Count { fields: 8, packed_bytes: 1 });
        assert!(count(&long).check().is_ok());

        let many = ModelInferRequest {
            inputs: vec![InferInputTensor::default(); 70_000],
            ..ModelInferRequest::default()
        };
        assert!(count(&many).check().is_err());
        let raw = ModelInferRequest {
            raw_input_contents: vec![Bytes::new(); 70_000],
            ..ModelInferRequest::default()
        };
        assert!(count(&raw).check().is_err());
        let numbers =
            InferTensorContents { int64_contents: vec![1; 2 << 20], ..InferTensorContents::default() };
        let packed = ModelInferRequest { inputs: vec![input(numbers)], ..ModelInferRequest::default() };
        assert!(count(&packed).check().is_err());
    }

    #[test]
    fn any_bytes_are_counted_to_their_end() {
        for length in 0..64_usize {
            for byte in [0, 1, 0x0a, 0x2a, 0x7f, 0x80, 0xff] {
                let mut count = Count::default();
                count.message(&vec![byte; length], MessageType::Request);
                assert!(count.fields <= length);
            }
        }
    }
}
