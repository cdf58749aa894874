//! Whole blocks and planes: checks lengths, picks the kernel for element, code, scale and machine.

use kvstore_block::ElementType;

use crate::error::{QuantiseError, exact};
use crate::format::{Code, Format, Fp8E4m3, Int8};
use crate::header::HEADER_BYTES;
use crate::kernel::{
    Bf16, Element, F32, dequantise_channels, dequantise_tokens, quantise_channels, quantise_tokens,
};
use crate::layout::{Grouping, QuantisedLayout};
use crate::scale::{Scale, ScaleBf16, ScaleF32, ScaleType};

/// The instruction set that the loops were compiled for. An AVX2 value exists only where the machine has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(Compiled);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compiled {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Isa {
    /// Runs everywhere.
    pub const PORTABLE: Self = Self(Compiled::Portable);

    /// The best that this machine has; the answer is cached by the standard library.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            return Self(Compiled::Avx2);
        }
        Self::PORTABLE
    }
}

/// What a plane's kernel does.
trait Work {
    fn run<E: Element, C: Code, S: Scale>(self) -> Result<(), QuantiseError>;
}

struct Quantise<'a> {
    grouping: Grouping,
    channels: usize,
    source: &'a [u8],
    scales: &'a mut [u8],
    codes: &'a mut [u8],
}

struct Dequantise<'a> {
    grouping: Grouping,
    channels: usize,
    scales: &'a [u8],
    codes: &'a [u8],
    target: &'a mut [u8],
}

impl Work for Quantise<'_> {
    #[inline(always)]
    fn run<E: Element, C: Code, S: Scale>(self) -> Result<(), QuantiseError> {
        match self.grouping {
            Grouping::Channel => {
                quantise_channels::<E, C, S>(self.channels, self.source, self.scales, self.codes)
            }
            Grouping::Token(group) => {
                quantise_tokens::<E, C, S>(group as usize, self.source, self.scales, self.codes)
            }
        }
    }
}

impl Work for Dequantise<'_> {
    #[inline(always)]
    fn run<E: Element, C: Code, S: Scale>(self) -> Result<(), QuantiseError> {
        match self.grouping {
            Grouping::Channel => {
                dequantise_channels::<E, C, S>(self.channels, self.scales, self.codes, self.target)
            }
            Grouping::Token(group) => {
                dequantise_tokens::<E, C, S>(group as usize, self.scales, self.codes, self.target)
            }
        }
    }
}

/// The same code as everywhere, compiled with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<E: Element, C: Code, S: Scale>(work: impl Work) -> Result<(), QuantiseError> {
    work.run::<E, C, S>()
}

fn run_on<E: Element, C: Code, S: Scale>(isa: Isa, work: impl Work) -> Result<(), QuantiseError> {
    match isa.0 {
        Compiled::Portable => work.run::<E, C, S>(),
        #[cfg(target_arch = "x86_64")]
        Compiled::Avx2 => {
            // SAFETY: the only precondition is that the machine has AVX2; an `Isa` with this value is made by
            // `Isa::detect` alone, after the check.
            unsafe { run_avx2::<E, C, S>(work) }
        }
    }
}

impl QuantisedLayout {
    /// Quantises a block (`layout().block_bytes()` bytes) into a payload of [`bytes`](Self::bytes) bytes. After
    /// an error the payload's content is undefined.
    pub fn quantise(&self, source: &[u8], target: &mut [u8]) -> Result<(), QuantiseError> {
        exact("block", source.len(), self.layout().block_bytes())?;
        exact("payload", target.len(), self.bytes())?;
        target[..HEADER_BYTES].copy_from_slice(&self.header());
        for (layer, part) in self.planes() {
            let from = self.layout().offset(layer, part, 0);
            let to = self.plane_offset(layer, part);
            let source = &source[from..from + self.layout().part_bytes()];
            let target = &mut target[to..to + self.plane_bytes(part)];
            self.quantise_plane(Isa::detect(), part, source, target)?;
        }
        Ok(())
    }

    /// Restores a block from a payload whose header is checked. After an error the block's content is undefined.
    pub fn dequantise(&self, source: &[u8], target: &mut [u8]) -> Result<(), QuantiseError> {
        exact("payload", source.len(), self.bytes())?;
        exact("block", target.len(), self.layout().block_bytes())?;
        self.check_header(source)?;
        for (layer, part) in self.planes() {
            let from = self.plane_offset(layer, part);
            let to = self.layout().offset(layer, part, 0);
            let source = &source[from..from + self.plane_bytes(part)];
            let target = &mut target[to..to + self.layout().part_bytes()];
            self.dequantise_plane(Isa::detect(), part, source, target)?;
        }
        Ok(())
    }

    /// Quantises one plane: `layout().part_bytes()` bytes into [`plane_bytes`](Self::plane_bytes) bytes.
    pub fn quantise_plane(
        &self,
        isa: Isa,
        part: usize,
        source: &[u8],
        target: &mut [u8],
    ) -> Result<(), QuantiseError> {
        exact("part of a block", source.len(), self.layout().part_bytes())?;
        exact("plane", target.len(), self.plane_bytes(part))?;
        let (scales, codes) = target.split_at_mut(self.scale_bytes(part));
        let (grouping, channels) = (self.grouping(part), self.layout().token_elements());
        self.dispatch(isa, Quantise { grouping, channels, source, scales, codes })
    }

    /// Restores one plane.
    pub fn dequantise_plane(
        &self,
        isa: Isa,
        part: usize,
        source: &[u8],
        target: &mut [u8],
    ) -> Result<(), QuantiseError> {
        exact("plane", source.len(), self.plane_bytes(part))?;
        exact("part of a block", target.len(), self.layout().part_bytes())?;
        let (scales, codes) = source.split_at(self.scale_bytes(part));
        let (grouping, channels) = (self.grouping(part), self.layout().token_elements());
        self.dispatch(isa, Dequantise { grouping, channels, scales, codes, target })
    }

    fn planes(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (layers, parts) = (usize::from(self.layout().layers), usize::from(self.layout().parts));
        (0..layers).flat_map(move |layer| (0..parts).map(move |part| (layer, part)))
    }

    fn dispatch(&self, isa: Isa, work: impl Work) -> Result<(), QuantiseError> {
        match self.layout().element {
            ElementType::Bf16 => self.dispatch_code::<Bf16>(isa, work),
            ElementType::F32 => self.dispatch_code::<F32>(isa, work),
        }
    }

    fn dispatch_code<E: Element>(&self, isa: Isa, work: impl Work) -> Result<(), QuantiseError> {
        match (self.scheme().format, self.scheme().scale) {
            (Format::Fp8E4m3, ScaleType::F32) => run_on::<E, Fp8E4m3, ScaleF32>(isa, work),
            (Format::Fp8E4m3, ScaleType::Bf16) => run_on::<E, Fp8E4m3, ScaleBf16>(isa, work),
            (Format::Int8, ScaleType::F32) => run_on::<E, Int8, ScaleF32>(isa, work),
            (Format::Int8, ScaleType::Bf16) => run_on::<E, Int8, ScaleBf16>(isa, work),
        }
    }
}
