//! Tensors in messages: typed contents, or raw bytes in the order of the inputs.
//!
//! Raw numbers are little-endian; a raw element of type BYTES is four bytes of little-endian length and then that
//! many bytes. A request uses one form for all its inputs.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::error::Error;
use crate::proto::inference::InferTensorContents;
use crate::proto::inference::model_infer_request::InferInputTensor;
use crate::proto::inference::model_infer_response::InferOutputTensor;

/// Largest number of elements of a tensor: only prompts and stop strings have several. It bounds the memory
/// that a small message can make the server allocate.
pub(crate) const ELEMENTS_MAX: usize = 1024;

/// Encoding of contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// In `raw_input_contents` and `raw_output_contents`.
    Raw,
    /// In `contents`, by type.
    Typed,
}

/// The elements of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Values {
    Bool(Vec<bool>),
    Int(Vec<i64>),
    Unsigned(Vec<u64>),
    /// For FP32 the f64 with the same decimal notation: 0.1 of FP32 is 0.1 here.
    Float(Vec<f64>),
    Bytes(Vec<Bytes>),
}

impl Values {
    fn len(&self) -> usize {
        match self {
            Self::Bool(values) => values.len(),
            Self::Int(values) => values.len(),
            Self::Unsigned(values) => values.len(),
            Self::Float(values) => values.len(),
            Self::Bytes(values) => values.len(),
        }
    }
}

/// An input whose length matches its shape.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<i64>,
    pub(crate) values: Values,
}

/// Reads the inputs of a request.
pub(crate) fn read(inputs: Vec<InferInputTensor>, raw: Vec<Bytes>) -> Result<(Vec<Tensor>, Form), Error> {
    if raw.is_empty() {
        let tensors = inputs.into_iter().map(typed).collect::<Result<_, _>>()?;
        return Ok((tensors, Form::Typed));
    }
    if raw.len() != inputs.len() {
        let message = format!(
            "`raw_input_contents` has {} entries for {} inputs; it needs one for each",
            raw.len(),
            inputs.len()
        );
        return Err(Error::Request(message));
    }
    let tensors = inputs.into_iter().zip(raw).map(|(input, bytes)| untyped(input, bytes));
    Ok((tensors.collect::<Result<_, _>>()?, Form::Raw))
}

/// Returns the number of elements in the shape.
fn elements(input: &InferInputTensor) -> Result<usize, Error> {
    if input.parameters.contains_key("shared_memory_region") {
        return Err(Error::field(&input.name, "shared memory is not supported"));
    }
    let product = input.shape.iter().try_fold(1usize, |product, side| {
        usize::try_from(*side).ok().and_then(|side| product.checked_mul(side))
    });
    match product {
        Some(count) if count <= ELEMENTS_MAX => Ok(count),
        Some(count) => Err(Error::field(
            &input.name,
            format!("{count} elements are more than {ELEMENTS_MAX}, the limit"),
        )),
        None => Err(Error::field(&input.name, format!("the shape {:?} cannot be", input.shape))),
    }
}

fn typed(input: InferInputTensor) -> Result<Tensor, Error> {
    let count = elements(&input)?;
    let Some(contents) = input.contents else {
        return Err(Error::field(input.name, "has neither `contents` nor an entry in `raw_input_contents`"));
    };
    let values = match input.datatype.as_str() {
        "BOOL" => Values::Bool(contents.bool_contents),
        "INT8" | "INT16" | "INT32" => Values::Int(contents.int_contents.into_iter().map(i64::from).collect()),
        "INT64" => Values::Int(contents.int64_contents),
        "UINT8" | "UINT16" | "UINT32" => {
            Values::Unsigned(contents.uint_contents.into_iter().map(u64::from).collect())
        }
        "UINT64" => Values::Unsigned(contents.uint64_contents),
        "FP32" => Values::Float(contents.fp32_contents.into_iter().map(widen).collect()),
        "FP64" => Values::Float(contents.fp64_contents),
        "BYTES" => Values::Bytes(contents.bytes_contents),
        other => return Err(unknown_datatype(&input.name, other)),
    };
    if values.len() != count {
        let reason = format!(
            "`contents` has {} elements of type {} where the shape {:?} needs {count}",
            values.len(),
            input.datatype,
            input.shape
        );
        return Err(Error::field(input.name, reason));
    }
    Ok(Tensor { name: input.name, shape: input.shape, values })
}

fn untyped(input: InferInputTensor, mut raw: Bytes) -> Result<Tensor, Error> {
    let count = elements(&input)?;
    if input.contents.is_some() {
        return Err(Error::field(input.name, "`contents` must be absent where `raw_input_contents` is used"));
    }
    let width = match input.datatype.as_str() {
        "BYTES" => {
            let values = Values::Bytes(strings(&input.name, count, raw)?);
            return Ok(Tensor { name: input.name, shape: input.shape, values });
        }
        "BOOL" | "INT8" | "UINT8" => 1,
        "INT16" | "UINT16" => 2,
        "INT32" | "UINT32" | "FP32" => 4,
        "INT64" | "UINT64" | "FP64" => 8,
        other => return Err(unknown_datatype(&input.name, other)),
    };
    if raw.len() != count * width {
        let reason = format!(
            "{} raw bytes where the shape {:?} of type {} needs {}",
            raw.len(),
            input.shape,
            input.datatype,
            count * width
        );
        return Err(Error::field(input.name, reason));
    }
    let raw = &mut raw;
    let values = match input.datatype.as_str() {
        "BOOL" => Values::Bool(each(count, || raw.get_u8() != 0)),
        "INT8" => Values::Int(each(count, || raw.get_i8().into())),
        "INT16" => Values::Int(each(count, || raw.get_i16_le().into())),
        "INT32" => Values::Int(each(count, || raw.get_i32_le().into())),
        "INT64" => Values::Int(each(count, || raw.get_i64_le())),
        "UINT8" => Values::Unsigned(each(count, || raw.get_u8().into())),
        "UINT16" => Values::Unsigned(each(count, || raw.get_u16_le().into())),
        "UINT32" => Values::Unsigned(each(count, || raw.get_u32_le().into())),
        "UINT64" => Values::Unsigned(each(count, || raw.get_u64_le())),
        "FP32" => Values::Float(each(count, || widen(raw.get_f32_le()))),
        _ => Values::Float(each(count, || raw.get_f64_le())),
    };
    Ok(Tensor { name: input.name, shape: input.shape, values })
}

fn each<T>(count: usize, read: impl FnMut() -> T) -> Vec<T> {
    std::iter::repeat_with(read).take(count).collect()
}

/// Parses raw elements of type BYTES: exactly `count`, with no bytes after them.
fn strings(name: &str, count: usize, mut raw: Bytes) -> Result<Vec<Bytes>, Error> {
    let mut values = Vec::with_capacity(count);
    for index in 0..count {
        let length = raw.try_get_u32_le().map_err(|_| {
            Error::field(name, format!("the raw bytes end before the length of element {index} of {count}"))
        })? as usize;
        if length > raw.len() {
            let reason =
                format!("element {index} of {count} says {length} bytes, but only {} follow", raw.len());
            return Err(Error::field(name, reason));
        }
        values.push(raw.split_to(length));
    }
    if raw.is_empty() {
        return Ok(values);
    }
    Err(Error::field(name, format!("{} raw bytes follow the last of {count} elements", raw.len())))
}

fn unknown_datatype(name: &str, datatype: &str) -> Error {
    Error::field(name, format!("the datatype `{datatype}` is not supported here"))
}

/// Returns the f64 with the same decimal notation.
fn widen(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| f64::from(number))
}

/// Collects the outputs of a response.
#[derive(Debug)]
pub(crate) struct Writer {
    form: Form,
    pub(crate) outputs: Vec<InferOutputTensor>,
    pub(crate) raw: Vec<Bytes>,
}

impl Writer {
    pub(crate) fn new(form: Form) -> Self {
        Self { form, outputs: Vec::new(), raw: Vec::new() }
    }

    /// Appends a tensor of texts.
    pub(crate) fn texts(&mut self, name: &str, shape: &[i64], texts: Vec<Bytes>) {
        let contents = match self.form {
            Form::Typed => Some(InferTensorContents { bytes_contents: texts, ..Default::default() }),
            Form::Raw => {
                let mut raw = BytesMut::with_capacity(texts.iter().map(|text| 4 + text.len()).sum());
                for text in texts {
                    // A text of 4 GiB exceeds every limit on answers.
                    raw.put_u32_le(u32::try_from(text.len()).unwrap_or(u32::MAX));
                    raw.put(text);
                }
                self.raw.push(raw.freeze());
                None
            }
        };
        self.push(name, "BYTES", shape, contents);
    }

    /// Appends a tensor of one count.
    pub(crate) fn count(&mut self, name: &str, count: u32) {
        let contents = match self.form {
            Form::Typed => Some(InferTensorContents { uint_contents: vec![count], ..Default::default() }),
            Form::Raw => {
                self.raw.push(Bytes::copy_from_slice(&count.to_le_bytes()));
                None
            }
        };
        self.push(name, "UINT32", &[1], contents);
    }

    fn push(&mut self, name: &str, datatype: &str, shape: &[i64], contents: Option<InferTensorContents>) {
        self.outputs.push(InferOutputTensor {
            name: name.to_owned(),
            datatype: datatype.to_owned(),
            shape: shape.to_vec(),
            contents,
            ..Default::default()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(datatype: &str, shape: &[i64]) -> InferInputTensor {
        InferInputTensor {
            name: "t".to_owned(),
            datatype: datatype.to_owned(),
            shape: shape.to_vec(),
            ..Default::default()
        }
    }

    fn read_raw(datatype: &str, shape: &[i64], raw: &[u8]) -> Result<Values, String> {
        let read = read(vec![input(datatype, shape)], vec![Bytes::copy_from_slice(raw)]);
        let (mut tensors, form) = read.map_err(|error| error.to_string())?;
        assert_eq!(form, Form::Raw);
        Ok(tensors.remove(0).values)
    }

    #[test]
    fn raw_numbers_of_every_type() {
        let cases: [(&str, &[u8], Values); 11] = [
            ("BOOL", &[1, 0], Values::Bool(vec![true, false])),
            ("INT8", &[0xff, 1], Values::Int(vec![-1, 1])),
            ("INT16", &[0xfe, 0xff, 1, 0], Values::Int(vec![-2, 1])),
            ("INT32", &[0xfd, 0xff, 0xff, 0xff, 1, 0, 0, 0], Values::Int(vec![-3, 1])),
            ("INT64", &[7, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0], Values::Int(vec![7, 8])),
            ("UINT8", &[0xff, 1], Values::Unsigned(vec![255, 1])),
            ("UINT16", &[0xff, 0xff, 1, 0], Values::Unsigned(vec![65535, 1])),
            ("UINT32", &[0, 0, 0, 0x80, 1, 0, 0, 0], Values::Unsigned(vec![1 << 31, 1])),
            ("UINT64", &[0xff; 16], Values::Unsigned(vec![u64::MAX; 2])),
            ("FP32", &[0xcd, 0xcc, 0xcc, 0x3d, 0, 0, 0, 0x40], Values::Float(vec![0.1, 2.0])),
            ("FP64", &[0, 0, 0, 0, 0, 0, 0xe0, 0x3f, 0, 0, 0, 0, 0, 0, 0, 0], Values::Float(vec![0.5, 0.0])),
        ];
        for (datatype, raw, wanted) in cases {
            assert_eq!(read_raw(datatype, &[2], raw), Ok(wanted), "{datatype}");
            let short = read_raw(datatype, &[2], &raw[1..]).expect_err("a byte is missing");
            assert!(short.starts_with("`t`: "), "{short}");
        }
    }

    #[test]
    fn malformed_raw_strings() {
        let cases: [(&[i64], &[u8], &str); 6] = [
            (&[1], &[1, 0, 0], "`t`: the raw bytes end before the length of element 0 of 1"),
            (&[1], &[2, 0, 0, 0, b'a'], "`t`: element 0 of 1 says 2 bytes, but only 1 follow"),
            (
                &[1],
                &[255, 255, 255, 255, b'a'],
                "`t`: element 0 of 1 says 4294967295 bytes, but only 1 follow",
            ),
            (&[1], &[1, 0, 0, 0, b'a', b'b'], "`t`: 1 raw bytes follow the last of 1 elements"),
            (&[2], &[1, 0, 0, 0, b'a'], "`t`: the raw bytes end before the length of element 1 of 2"),
            (&[1 << 40, 1 << 40], &[], "`t`: the shape [1099511627776, 1099511627776] cannot be"),
        ];
        for (shape, raw, wanted) in cases {
            assert_eq!(read_raw("BYTES", shape, raw), Err(wanted.to_owned()));
        }
        let many = read_raw("BYTES", &[2048], &[]);
        assert_eq!(many, Err("`t`: 2048 elements are more than 1024, the limit".to_owned()));
        assert!(read_raw("BYTES", &[-1], &[]).is_err());
        assert!(read_raw("FP16", &[1], &[0, 0]).is_err());
    }

    #[test]
    fn what_is_written_is_read_again_in_both_forms() {
        let texts = vec![Bytes::from_static(b"one"), Bytes::new(), Bytes::from_static("drei €".as_bytes())];
        for form in [Form::Raw, Form::Typed] {
            let mut writer = Writer::new(form);
            writer.texts("t", &[3], texts.clone());
            let output = writer.outputs.remove(0);
            let again =
                InferInputTensor { contents: output.contents, ..input(&output.datatype, &output.shape) };
            let (tensors, read_form) = read(vec![again], writer.raw).expect("well-formed");
            assert_eq!(read_form, form);
            assert_eq!(tensors[0].values, Values::Bytes(texts.clone()));
        }
    }

    #[test]
    fn forms_do_not_mix() {
        let contents = InferTensorContents { bool_contents: vec![true], ..Default::default() };
        let both = InferInputTensor { contents: Some(contents.clone()), ..input("BOOL", &[1]) };
        let raw = Bytes::from_static(&[1]);
        assert!(read(vec![both.clone()], vec![raw.clone()]).is_err());
        assert!(read(vec![input("BOOL", &[1])], vec![raw.clone(), raw]).is_err());
        assert!(read(vec![input("BOOL", &[1])], Vec::new()).is_err());
        assert!(read(vec![InferInputTensor { shape: vec![2], ..both.clone() }], Vec::new()).is_err());
        assert!(read(vec![InferInputTensor { datatype: "INT32".to_owned(), ..both }], Vec::new()).is_err());
    }
}
