//! Plans: decide whether loading a prompt's blocks is faster than computing them.

use std::iter::zip;
use std::mem::offset_of;
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_store::{Plan, Prompt as StorePrompt, PromptGroup, RemoteCoverage};

use super::boundary::{Handle, elements, guarded, invalid, versioned, write_optional};
use super::paged::{FETCH, LOAD};
use crate::backend::Identity;
use crate::handles;
use crate::queue::IDENTITIES_MAX;
use crate::status::{Failure, Status};

/// Event: a prompt of a conversation arrived.
const CONTINUED: u32 = 0;
/// Event: the answer of a conversation is complete.
const IDLE: u32 = 1;
/// Operation of a plan that loads nothing.
const COMPUTE: u32 = 0;
/// Bound of the tokens of a prompt, and of those before it.
const TOKENS_MAX: u64 = 1 << 31;
/// Most groups of a prompt, beside its own blocks.
const GROUPS_MAX: usize = 64;

/// A group of layers with blocks of its own, `kvasir_kv_group` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Group {
    /// Identities of the group's blocks, as many as the prompt has.
    pub identities: *const Identity,
    /// Number of blocks needed before the first block that is computed.
    pub window_blocks: u64,
}

/// A prompt to be computed, `kvasir_kv_prompt` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Prompt {
    /// Size of the structure in the caller's header.
    pub bytes: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Identities of the whole blocks behind those that the engine holds.
    pub identities: *const Identity,
    /// Number of identities.
    pub count: usize,
    /// Number of preceding blocks that the engine holds.
    pub held: u64,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Prompt tokens queued in the engine before this prompt.
    pub queued_tokens: u64,
    /// 1 or 2: the plan may be a fetch.
    pub may_fetch: u32,
    /// With `may_fetch` 2: number of leading identities that other nodes hold.
    pub others: u32,
    /// Groups of layers with blocks of their own.
    pub groups: *const Group,
    /// Number of groups.
    pub group_count: usize,
}

/// The plan for a prompt, `kvasir_kv_plan` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptPlan {
    /// Operation: 0 compute, 6 load, 9 fetch.
    pub operation: u32,
    /// Longest time of the transfer in microseconds.
    pub deadline_us: u32,
    /// For a load: number of blocks.
    pub blocks: u64,
}

/// Microseconds left until the deadline, at least 1: 0 means no deadline.
fn microseconds_until(deadline: Instant) -> u32 {
    let left = deadline.saturating_duration_since(Instant::now()).as_micros();
    u32::try_from(left).unwrap_or(u32::MAX).max(1)
}

/// # Safety
/// As in the header: null, or a prompt as long as its field `bytes` says.
unsafe fn read(prompt: *const Prompt) -> Result<Prompt, Failure> {
    // SAFETY: not null, and every version has this field.
    let bytes_of = |prompt: *const Prompt| unsafe { (*prompt).bytes } as usize;
    // SAFETY: the caller promised as many bytes; plain numbers and a pointer, for which zero is a value.
    let prompt = unsafe { versioned(prompt, "kvasir_kv_prompt", offset_of!(Prompt, groups), bytes_of) }?;
    if prompt.block_tokens == 0 {
        return Err(invalid("block_tokens is 0"));
    }
    if prompt.count > IDENTITIES_MAX || prompt.held > IDENTITIES_MAX as u64 {
        return Err(invalid("count or held is above 2^20"));
    }
    if prompt.tokens >= TOKENS_MAX || prompt.queued_tokens >= TOKENS_MAX {
        return Err(invalid("tokens or queued_tokens is 2^31 or more"));
    }
    let least = (prompt.held + prompt.count as u64) * u64::from(prompt.block_tokens);
    if prompt.tokens < least {
        let text = format!(
            "tokens is {}, and {} blocks have {least}",
            prompt.tokens,
            prompt.held + prompt.count as u64
        );
        return Err(invalid(&text));
    }
    if prompt.may_fetch > 2 || (prompt.others != 0 && prompt.may_fetch != 2) {
        return Err(invalid("may_fetch is not 0, 1 or 2, or others is not 0 and may_fetch is not 2"));
    }
    if prompt.group_count > GROUPS_MAX {
        return Err(invalid("group_count is above 64"));
    }
    Ok(prompt)
}

/// Plans a prompt: compute, load or fetch.
///
/// # Safety
/// As in the header: one prompt with its identities and groups, `plan` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_plan_prompt(
    handle: *mut Handle,
    prompt: *const Prompt,
    plan: *mut PromptPlan,
) -> i32 {
    guarded(|| {
        if plan.is_null() {
            return Err(invalid("the place for the plan is a null pointer"));
        }
        let nothing = PromptPlan { operation: COMPUTE, deadline_us: 0, blocks: 0 };
        // SAFETY: writable by this function's contract.
        unsafe { write_optional(plan, nothing) };
        // SAFETY: the caller promised one.
        let prompt = unsafe { read(prompt) }?;
        let opened = handles::find(handle.addr())?;
        // SAFETY: the caller promised as many identities.
        let identities =
            unsafe { elements(prompt.identities, prompt.count, "identities is a null pointer") }?;
        let chain: Vec<BlockIdentity> = identities.iter().copied().map(BlockIdentity).collect();
        // SAFETY: the caller promised as many groups.
        let groups = unsafe { elements(prompt.groups, prompt.group_count, "groups is a null pointer") }?;
        let mut of_groups: Vec<Vec<BlockIdentity>> = Vec::with_capacity(groups.len());
        for group in groups {
            let text = "identities of a group is a null pointer";
            // SAFETY: the caller promised as many identities as the prompt has.
            let identities = unsafe { elements(group.identities, prompt.count, text) }?;
            of_groups.push(identities.iter().copied().map(BlockIdentity).collect());
        }
        let groups: Vec<PromptGroup<'_>> = zip(groups, &of_groups)
            .map(|(group, chain)| PromptGroup {
                chain,
                window_blocks: usize::try_from(group.window_blocks).unwrap_or(usize::MAX),
            })
            .collect();
        let asked = StorePrompt {
            chain: &chain,
            groups: &groups,
            device_blocks: prompt.held as usize,
            tokens: prompt.tokens as usize,
            block_tokens: prompt.block_tokens as usize,
            queued_tokens: prompt.queued_tokens,
        };
        let others = match prompt.may_fetch {
            0 => RemoteCoverage::Asked,
            1 => RemoteCoverage::Unknown,
            _ => RemoteCoverage::Hold(prompt.others as usize),
        };
        let answer = match opened.backend.store().plan(&asked, others) {
            Plan::Recompute => nothing,
            Plan::Onboard { blocks, deadline } => PromptPlan {
                operation: LOAD,
                deadline_us: microseconds_until(deadline),
                blocks: blocks as u64,
            },
            Plan::AskOthers { deadline } => {
                PromptPlan { operation: FETCH, deadline_us: microseconds_until(deadline), blocks: 0 }
            }
        };
        // SAFETY: as above.
        unsafe { write_optional(plan, answer) };
        Ok(Status::Ok)
    })
}

/// Reports the time that the engine took to compute tokens behind a prefix.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_observe_prefill(
    handle: *mut Handle,
    tokens: u64,
    context: u64,
    elapsed_us: u64,
) -> i32 {
    guarded(|| {
        if tokens >= TOKENS_MAX || context >= TOKENS_MAX {
            return Err(invalid("tokens or context is 2^31 or more"));
        }
        let opened = handles::find(handle.addr())?;
        let elapsed = Duration::from_micros(elapsed_us);
        opened.backend.store().observe_prefill(tokens as usize, context as usize, elapsed);
        Ok(Status::Ok)
    })
}

/// Reports that a conversation continues, or waits for its user.
///
/// # Safety
/// As in the header: as many identities as `count` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_conversation(
    handle: *mut Handle,
    event: u32,
    identities: *const Identity,
    count: usize,
) -> i32 {
    guarded(|| {
        if event > IDLE {
            return Err(invalid("event is neither 0 (continued) nor 1 (idle)"));
        }
        if count == 0 || count > IDENTITIES_MAX {
            return Err(invalid("count is 0 or above 2^20"));
        }
        let opened = handles::find(handle.addr())?;
        // SAFETY: the caller promised as many identities.
        let identities = unsafe { elements(identities, count, "identities is a null pointer") }?;
        let chain: Vec<BlockIdentity> = identities.iter().copied().map(BlockIdentity).collect();
        match event {
            CONTINUED => opened.backend.store().prompt_arrived(&chain),
            _ => opened.backend.store().mark_conversation_idle(&chain),
        }
        Ok(Status::Ok)
    })
}

/// Most blocks of one retention request.
const RETAINED_MAX: usize = 1 << 17;

/// Retains blocks for a given time.
///
/// # Safety
/// As in the header: as many identities as `count` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_retain(
    handle: *mut Handle,
    identities: *const Identity,
    count: usize,
    seconds: u32,
) -> i32 {
    guarded(|| {
        if count == 0 || count > RETAINED_MAX {
            return Err(invalid("count is 0 or above 2^17"));
        }
        if seconds == 0 {
            return Err(invalid("seconds is 0"));
        }
        let opened = handles::find(handle.addr())?;
        // SAFETY: the caller promised as many identities.
        let identities = unsafe { elements(identities, count, "identities is a null pointer") }?;
        let chain: Vec<BlockIdentity> = identities.iter().copied().map(BlockIdentity).collect();
        match opened.backend.store().retain(&chain, Duration::from_secs(seconds.into())) {
            Ok(()) => Ok(Status::Ok),
            Err(_) => Ok(Status::Throttled),
        }
    })
}
