//! An engine's paged tensors as described by C, checked: planes whose blocks all lie within addressable memory.
//!
//! A block has a piece in each plane; its payload is these pieces, one plane after the other. This module never
//! accesses the memory: the header obliges the engine that registers tensors to keep it mapped.

use std::ffi::c_void;
use std::ptr::NonNull;

use crate::buffers::{BUFFERS_MAX, Buffer, Ranges};
use crate::status::{Failure, Status};

/// A layer's keys, values or latents, `kvasir_kv_plane` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Plane {
    /// Address of block 0.
    pub start: *mut c_void,
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// Bytes of a block in this plane.
    pub block_bytes: u64,
}

/// Tensors to register, `kvasir_kv_tensors` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Tensors {
    /// Kind of memory: 0 host memory, 1 CUDA.
    pub memory: u32,
    /// Ordinal of the device in the driver; 0 for host memory.
    pub device: i32,
    /// Number of blocks of each plane.
    pub blocks: u64,
    /// The planes, in their order in a payload.
    pub planes: *const Plane,
    /// Number of planes.
    pub plane_count: usize,
}

/// Memory that holds tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    Host,
    /// Memory of the device with this ordinal.
    Cuda(u32),
}

impl std::fmt::Display for Memory {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => formatter.write_str("host memory"),
            Self::Cuda(ordinal) => write!(formatter, "memory of CUDA device {ordinal}"),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct PlaneRange {
    pub(crate) start: NonNull<u8>,
    pub(crate) stride: usize,
    pub(crate) bytes: usize,
}

/// Tensors whose sizes are consistent and whose end is addressable.
#[derive(Debug)]
pub(crate) struct PagedTensors {
    memory: Memory,
    blocks: u64,
    planes: Vec<PlaneRange>,
}

// SAFETY: the header obliges the engine to let any thread use the memory while a transfer is in flight; no
// other field is tied to a thread.
unsafe impl Send for PagedTensors {}
// SAFETY: as above; the addresses are only read.
unsafe impl Sync for PagedTensors {}

fn wrong(field: impl Into<String>) -> Failure {
    Failure::new(Status::InvalidArgument, field)
}

impl PagedTensors {
    /// Checks tensors as described by C. `planes` is the array that `tensors` points to.
    pub(crate) fn check(
        tensors: &Tensors,
        planes: &[Plane],
        payload_bytes_max: usize,
    ) -> Result<Self, Failure> {
        let memory = match (tensors.memory, u32::try_from(tensors.device)) {
            (0, Ok(0)) => Memory::Host,
            (0, _) => return Err(wrong(format!("device is {}; for host memory it is 0", tensors.device))),
            (1, Ok(ordinal)) => Memory::Cuda(ordinal),
            (1, Err(_)) => return Err(wrong(format!("device {} is below 0", tensors.device))),
            (other, _) => return Err(wrong(format!("memory {other} is unknown"))),
        };
        if tensors.blocks == 0 {
            return Err(wrong("blocks is 0"));
        }
        if planes.is_empty() || planes.len() > BUFFERS_MAX {
            return Err(wrong(format!("plane_count {} is not in 1 to {BUFFERS_MAX}", planes.len())));
        }
        let mut ranges = Vec::new();
        ranges.try_reserve_exact(planes.len()).map_err(|_| Failure::no_memory("the planes"))?;
        let mut payload_bytes = 0_usize;
        for (number, plane) in planes.iter().enumerate() {
            let range = PlaneRange::check(number, plane, tensors.blocks)?;
            payload_bytes = payload_bytes.saturating_add(range.bytes);
            ranges.push(range);
        }
        if payload_bytes > payload_bytes_max {
            let text = format!(
                "a block of all planes has {payload_bytes} bytes, which is above the store's {payload_bytes_max}"
            );
            return Err(Failure::new(Status::TooLarge, text));
        }
        Ok(Self { memory, blocks: tensors.blocks, planes: ranges })
    }

    pub(crate) fn memory(&self) -> Memory {
        self.memory
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Bytes of a block over all planes.
    pub(crate) fn block_bytes(&self) -> usize {
        self.planes.iter().map(|plane| plane.bytes).sum()
    }

    pub(crate) fn planes(&self) -> &[PlaneRange] {
        &self.planes
    }

    /// Returns the host memory of a block. The block's number must be below [`Self::blocks`].
    pub(crate) fn ranges(&self, block: u64, buffers: &mut Vec<Buffer>) -> Result<Ranges, Failure> {
        buffers.clear();
        buffers.extend(self.planes.iter().map(|plane| {
            // Within the plane, whose end `PlaneRange::check` has found addressable.
            let start = plane.start.as_ptr().wrapping_add(block as usize * plane.stride);
            Buffer { start: start.cast(), bytes: plane.bytes }
        }));
        Ranges::check(buffers)
    }
}

impl PlaneRange {
    /// Stride and bytes of a piece. Planes with equal values can share one kernel launch.
    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.stride, self.bytes)
    }

    fn check(number: usize, plane: &Plane, blocks: u64) -> Result<Self, Failure> {
        let Plane { start, block_stride, block_bytes } = *plane;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| wrong(format!("planes[{number}].start is a null pointer")))?;
        if block_bytes == 0 {
            return Err(wrong(format!("planes[{number}].block_bytes is 0")));
        }
        if block_stride < block_bytes && blocks > 1 {
            let text = format!(
                "planes[{number}].block_stride of {block_stride} is below its block_bytes of {block_bytes}"
            );
            return Err(wrong(text));
        }
        let end = (blocks - 1)
            .checked_mul(block_stride)
            .and_then(|last| last.checked_add(block_bytes))
            .filter(|span| i64::try_from(*span).is_ok())
            .and_then(|span| span.checked_add(start.addr().get() as u64));
        if end.is_none() {
            let text = format!(
                "planes[{number}].block_stride of {block_stride} bytes times {blocks} blocks ends behind all memory"
            );
            return Err(wrong(text));
        }
        Ok(Self { start, stride: block_stride as usize, bytes: block_bytes as usize })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plane(start: usize, block_stride: u64, block_bytes: u64) -> Plane {
        Plane { start: std::ptr::without_provenance_mut(start), block_stride, block_bytes }
    }

    fn checked(memory: u32, device: i32, blocks: u64, planes: &[Plane]) -> Result<PagedTensors, Failure> {
        let tensors = Tensors { memory, device, blocks, planes: planes.as_ptr(), plane_count: planes.len() };
        PagedTensors::check(&tensors, planes, 1000)
    }

    #[test]
    fn a_mistake_is_told_by_its_field() {
        let good = plane(4096, 100, 100);
        let top = usize::MAX - 99;
        for (memory, device, blocks, planes, text) in [
            (2, 0, 1, &[good][..], "memory 2 is unknown"),
            (0, 1, 1, &[good], "device is 1"),
            (1, -1, 1, &[good], "device -1 is below 0"),
            (0, 0, 0, &[good], "blocks is 0"),
            (0, 0, 1, &[], "plane_count 0"),
            (0, 0, 1, &[good, plane(0, 100, 100)], "planes[1].start is a null pointer"),
            (0, 0, 1, &[plane(4096, 100, 0)], "planes[0].block_bytes is 0"),
            (0, 0, 2, &[good, plane(4096, 99, 100)], "planes[1].block_stride of 99"),
            (0, 0, u64::MAX, &[good], "planes[0].block_stride of 100 bytes times"),
            (0, 0, 1, &[plane(top, 0, 100)], "planes[0].block_stride of 0 bytes times 1 blocks"),
            (0, 0, 2, &[plane(4096, 1 << 63, 100)], "planes[0].block_stride of 9223372036854775808"),
        ] {
            let failure = checked(memory, device, blocks, planes).expect_err(text);
            assert_eq!(failure.status, Status::InvalidArgument, "{}", failure.text);
            assert!(failure.text.contains(text), "{} instead of {text}", failure.text);
        }
        let too_large = checked(0, 0, 2, &[plane(4096, 500, 500), plane(9000, 501, 501)]);
        assert_eq!(too_large.expect_err("1001 bytes").status, Status::TooLarge);
        assert_eq!(checked(1, 3, 2, &[good; 10]).expect("1000 bytes").memory(), Memory::Cuda(3));
        assert!(checked(0, 0, 1, &[plane(top - 1, 0, 100)]).is_ok(), "the last byte that has one behind it");
    }

    #[test]
    fn a_block_is_its_piece_of_each_plane() {
        let tensors = checked(0, 0, 5, &[plane(4096, 100, 30), plane(8192, 40, 40)]).expect("right");
        let (mut buffers, expected) = (Vec::new(), [(4096 + 400, 30), (8192 + 160, 40)]);
        tensors.ranges(4, &mut buffers).expect("ranges");
        let pieces: Vec<_> = buffers.iter().map(|buffer| (buffer.start.addr(), buffer.bytes)).collect();
        assert_eq!((pieces, tensors.blocks()), (expected.to_vec(), 5));
    }
}
