//! Assertions on the layout of the types shared with C. The C test asserts the same numbers of the header.
//!
//! Any change but an appended counter breaks the ABI: the number in `build.rs` changes with it.

use std::mem::offset_of;

use crate::backend::Statistics;
use crate::buffers::Buffer;
use crate::events::Event;
use crate::handoff::{HandOffStatistics, RailStatistics, StageStatistics};
use crate::interface::{Group, HandOff, Prompt, PromptPlan, Request, Transfer};
use crate::nodes::NodeStatistics;
use crate::queue::Completion;
use crate::tensors::{Plane, Tensors};

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<Buffer>() == 16 && align_of::<Buffer>() == 8);
    assert!(offset_of!(Buffer, start) == 0 && offset_of!(Buffer, bytes) == 8);

    assert!(size_of::<Request>() == 64 && align_of::<Request>() == 8);
    assert!(offset_of!(Request, user) == 0 && offset_of!(Request, operation) == 8);
    assert!(offset_of!(Request, reserved) == 12 && offset_of!(Request, identities) == 16);
    assert!(offset_of!(Request, identity_count) == 24 && offset_of!(Request, meta) == 32);
    assert!(offset_of!(Request, payload) == 48 && offset_of!(Request, payload_count) == 56);

    assert!(size_of::<Completion>() == 32 && align_of::<Completion>() == 8);
    assert!(offset_of!(Completion, user) == 0 && offset_of!(Completion, status) == 8);
    assert!(offset_of!(Completion, reserved) == 12 && offset_of!(Completion, meta_bytes) == 16);
    assert!(offset_of!(Completion, payload_bytes) == 24);

    assert!(size_of::<Statistics>() == 248 && align_of::<Statistics>() == 8);
    assert!(offset_of!(Statistics, blocks) == 0 && offset_of!(Statistics, hits) == 24);
    assert!(offset_of!(Statistics, evicted) == 56 && offset_of!(Statistics, disk_blocks) == 64);
    assert!(size_of::<Event>() == 24 && offset_of!(Event, kind) == 16 && offset_of!(Event, tier) == 20);
    assert!(offset_of!(Statistics, damaged) == 104 && offset_of!(Statistics, far_written) == 120);
    assert!(offset_of!(Statistics, events_lost) == 136 && offset_of!(Statistics, late) == 152);
    assert!(offset_of!(Statistics, prefetched) == 160 && offset_of!(Statistics, prefetch_wasted) == 176);
    assert!(offset_of!(Statistics, checksummed_bytes) == 184);
    assert!(offset_of!(Statistics, disk_write_failures) == 192);
    assert!(offset_of!(Statistics, far_searches) == 200 && offset_of!(Statistics, far_not_asked) == 224);
    assert!(offset_of!(Statistics, retained) == 232 && offset_of!(Statistics, retention_refused) == 240);

    assert!(size_of::<Plane>() == 24 && align_of::<Plane>() == 8);
    assert!(offset_of!(Plane, start) == 0 && offset_of!(Plane, block_stride) == 8);
    assert!(offset_of!(Plane, block_bytes) == 16);

    assert!(size_of::<Tensors>() == 32 && align_of::<Tensors>() == 8);
    assert!(offset_of!(Tensors, memory) == 0 && offset_of!(Tensors, device) == 4);
    assert!(offset_of!(Tensors, blocks) == 8 && offset_of!(Tensors, planes) == 16);
    assert!(offset_of!(Tensors, plane_count) == 24);

    assert!(size_of::<Transfer>() == 88 && align_of::<Transfer>() == 8);
    assert!(offset_of!(Transfer, user) == 0 && offset_of!(Transfer, operation) == 8);
    assert!(offset_of!(Transfer, bytes) == 12 && offset_of!(Transfer, tensors) == 16);
    assert!(offset_of!(Transfer, identities) == 24 && offset_of!(Transfer, blocks) == 32);
    assert!(offset_of!(Transfer, count) == 40 && offset_of!(Transfer, event) == 48);
    assert!(offset_of!(Transfer, parent) == 56 && offset_of!(Transfer, position) == 64);
    assert!(offset_of!(Transfer, is_chain) == 68 && offset_of!(Transfer, deadline_us) == 72);
    assert!(offset_of!(Transfer, held) == 76 && offset_of!(Transfer, tenant) == 80);

    assert!(size_of::<Prompt>() == 72 && align_of::<Prompt>() == 8);
    assert!(offset_of!(Prompt, bytes) == 0 && offset_of!(Prompt, block_tokens) == 4);
    assert!(offset_of!(Prompt, identities) == 8 && offset_of!(Prompt, count) == 16);
    assert!(offset_of!(Prompt, held) == 24 && offset_of!(Prompt, tokens) == 32);
    assert!(offset_of!(Prompt, queued_tokens) == 40 && offset_of!(Prompt, may_fetch) == 48);
    assert!(offset_of!(Prompt, others) == 52);
    assert!(offset_of!(Prompt, groups) == 56 && offset_of!(Prompt, group_count) == 64);
    assert!(size_of::<Group>() == 16 && align_of::<Group>() == 8);
    assert!(offset_of!(Group, identities) == 0 && offset_of!(Group, window_blocks) == 8);
    assert!(size_of::<PromptPlan>() == 16 && align_of::<PromptPlan>() == 8);
    assert!(offset_of!(PromptPlan, operation) == 0 && offset_of!(PromptPlan, deadline_us) == 4);
    assert!(offset_of!(PromptPlan, blocks) == 8);

    assert!(size_of::<HandOff>() == 104 && align_of::<HandOff>() == 8);
    assert!(offset_of!(HandOff, user) == 0 && offset_of!(HandOff, operation) == 8);
    assert!(offset_of!(HandOff, first_block) == 12 && offset_of!(HandOff, content) == 16);
    assert!(offset_of!(HandOff, tensors) == 32 && offset_of!(HandOff, blocks) == 40);
    assert!(offset_of!(HandOff, count) == 48 && offset_of!(HandOff, transfers) == 56);
    assert!(offset_of!(HandOff, transfer_count) == 64 && offset_of!(HandOff, addresses) == 72);
    assert!(offset_of!(HandOff, first_layer) == 80 && offset_of!(HandOff, layers) == 84);
    assert!(offset_of!(HandOff, deadline_ms) == 88 && offset_of!(HandOff, bytes) == 92);
    assert!(offset_of!(HandOff, event) == 96);

    assert!(size_of::<HandOffStatistics>() == 112 && align_of::<HandOffStatistics>() == 8);
    assert!(offset_of!(HandOffStatistics, bytes_sent) == 48);
    assert!(offset_of!(HandOffStatistics, slots_used) == 64);
    assert!(offset_of!(HandOffStatistics, sent_directly) == 72);
    assert!(offset_of!(HandOffStatistics, received_staged) == 96);
    assert!(offset_of!(HandOffStatistics, slots) == 104);
    assert!(size_of::<RailStatistics>() == 104 && align_of::<RailStatistics>() == 8);
    assert!(offset_of!(RailStatistics, block_bytes) == 64);
    assert!(offset_of!(RailStatistics, is_slow) == 96);
    assert!(size_of::<NodeStatistics>() == 216 && align_of::<NodeStatistics>() == 8);
    assert!(offset_of!(NodeStatistics, is_usable) == 128 && offset_of!(NodeStatistics, failures) == 168);
    assert!(offset_of!(NodeStatistics, leases) == 208);
    assert!(size_of::<StageStatistics>() == 216 && align_of::<StageStatistics>() == 8);
    assert!(offset_of!(StageStatistics, count) == 24 && offset_of!(StageStatistics, at_most) == 32);
};

/// Returns text for a field of a C structure, with a final 0; text that does not fit is cut.
pub(crate) fn text_field<const BYTES: usize>(text: &str) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    let cut = &text[..text.floor_char_boundary(BYTES - 1)];
    bytes[..cut.len()].copy_from_slice(cut.as_bytes());
    bytes
}
