//! The functions that C calls. Their contracts are in `include/kvasir_kv.h`.
//!
//! Each function checks its pointers, looks the handle up, and runs inside a guard that turns a panic into a
//! status. The text of a thread's last failure is kept for `kvasir_kv_last_error`.

mod blocks;
mod boundary;
mod events;
mod handoff;
mod opening;
mod paged;
mod plan;
mod submission;

pub use blocks::{
    kvasir_kv_delete, kvasir_kv_get, kvasir_kv_match, kvasir_kv_nodes, kvasir_kv_put, kvasir_kv_stats,
};
pub use boundary::{Handle, kvasir_kv_last_error, kvasir_kv_strerror, kvasir_kv_version};
pub use events::kvasir_kv_take_events;
pub use handoff::{
    HandOff, kvasir_kv_cancel_handoff, kvasir_kv_decline_handoff, kvasir_kv_end_handoff,
    kvasir_kv_handoff_address, kvasir_kv_handoff_rails, kvasir_kv_handoff_stages, kvasir_kv_handoff_stats,
    kvasir_kv_submit_handoff,
};
pub(crate) use opening::open_with;
pub use opening::{kvasir_kv_close, kvasir_kv_open, kvasir_kv_open_file};
pub use paged::{Transfer, kvasir_kv_register, kvasir_kv_submit_transfer, kvasir_kv_unregister};
pub use plan::{
    Group, Prompt, PromptPlan, kvasir_kv_conversation, kvasir_kv_observe_prefill, kvasir_kv_plan_prompt,
    kvasir_kv_retain,
};
pub use submission::{Request, kvasir_kv_event_fd, kvasir_kv_poll, kvasir_kv_submit};
