//! Event batches as vLLM 0.32 writes them.

use router_radix::EngineHash;

use crate::wire::{EventBatch, KvEvent, ROUTING_HASHES, Stored, medium_of};

/// Encodes a batch as vLLM 0.32 does: maps, the first seven keys of a `BlockStored` always there. Routing hashes, which vLLM
/// does not have, are a key behind all others.
#[must_use]
pub fn encode(batch: &EventBatch) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    // Writing to a Vec cannot fail.
    let _infallible = encode_into(batch, &mut out);
    out
}

fn encode_into(
    batch: &EventBatch,
    out: &mut Vec<u8>,
) -> std::result::Result<(), rmp::encode::ValueWriteError> {
    use rmp::encode as put;
    put::write_array_len(out, 3)?;
    put::write_f64(out, batch.timestamp)?;
    put::write_array_len(out, batch.events.len() as u32)?;
    for event in &batch.events {
        match event {
            KvEvent::Stored(stored) => encode_stored(stored, out)?,
            KvEvent::Removed(removed) => {
                put::write_map_len(out, 3)?;
                put::write_str(out, "type")?;
                put::write_str(out, "BlockRemoved")?;
                encode_hashes(&removed.hashes, out)?;
                put::write_str(out, "medium")?;
                put::write_str(out, medium_of(removed.tier))?;
            }
            // vLLM's format has no event for moved blocks: encoded as a removal from the former tier only.
            KvEvent::Moved(moved) => {
                put::write_map_len(out, 3)?;
                put::write_str(out, "type")?;
                put::write_str(out, "BlockRemoved")?;
                encode_hashes(&moved.hashes, out)?;
                put::write_str(out, "medium")?;
                put::write_str(out, medium_of(moved.from))?;
            }
            KvEvent::Cleared => {
                put::write_map_len(out, 1)?;
                put::write_str(out, "type")?;
                put::write_str(out, "AllBlocksCleared")?;
            }
        }
    }
    match batch.rank {
        Some(rank) => drop(put::write_uint(out, rank.into())?),
        None => put::write_nil(out).map_err(rmp::encode::ValueWriteError::InvalidMarkerWrite)?,
    }
    Ok(())
}

fn encode_hashes(
    hashes: &[EngineHash],
    out: &mut Vec<u8>,
) -> std::result::Result<(), rmp::encode::ValueWriteError> {
    rmp::encode::write_str(out, "block_hashes")?;
    rmp::encode::write_array_len(out, hashes.len() as u32)?;
    hashes.iter().try_for_each(|&hash| rmp::encode::write_uint(out, hash).map(drop))
}

fn encode_stored(
    stored: &Stored,
    out: &mut Vec<u8>,
) -> std::result::Result<(), rmp::encode::ValueWriteError> {
    use rmp::encode as put;
    let nil =
        |out: &mut Vec<u8>| put::write_nil(out).map_err(rmp::encode::ValueWriteError::InvalidMarkerWrite);
    let has_hashes = !stored.routing_hashes.is_empty();
    let further = [!stored.extras.is_empty(), stored.cache_salt.is_some(), has_hashes];
    put::write_map_len(out, 8 + further.iter().map(|is_there| u32::from(*is_there)).sum::<u32>())?;
    put::write_str(out, "type")?;
    put::write_str(out, "BlockStored")?;
    encode_hashes(&stored.hashes, out)?;
    put::write_str(out, "parent_block_hash")?;
    match stored.parent {
        Some(parent) => drop(put::write_uint(out, parent)?),
        None => nil(out)?,
    }
    put::write_str(out, "token_ids")?;
    put::write_array_len(out, stored.tokens.len() as u32)?;
    stored.tokens.iter().try_for_each(|&id| put::write_uint(out, id.into()).map(drop))?;
    put::write_str(out, "block_size")?;
    put::write_uint(out, stored.block_tokens as u64)?;
    put::write_str(out, "lora_id")?;
    nil(out)?;
    put::write_str(out, "medium")?;
    put::write_str(out, medium_of(stored.tier))?;
    put::write_str(out, "lora_name")?;
    match &stored.lora {
        Some(name) => put::write_str(out, name)?,
        None => nil(out)?,
    }
    if let Some(salt) = &stored.cache_salt {
        put::write_str(out, "cache_salt")?;
        put::write_str(out, salt)?;
    }
    if !stored.extras.is_empty() {
        put::write_str(out, "extra_keys")?;
        put::write_array_len(out, stored.hashes.len() as u32)?;
        for block in 0..stored.hashes.len() as u32 {
            let own = || stored.extras.iter().filter(|extra| extra.0 == block);
            match own().count() {
                0 => nil(out)?,
                count => {
                    put::write_array_len(out, count as u32)?;
                    own().try_for_each(|extra| put::write_str(out, &extra.1))?;
                }
            }
        }
    }
    if has_hashes {
        put::write_str(out, ROUTING_HASHES)?;
        put::write_array_len(out, stored.routing_hashes.len() as u32)?;
        stored.routing_hashes.iter().try_for_each(|&hash| put::write_uint(out, hash).map(drop))?;
    }
    Ok(())
}
