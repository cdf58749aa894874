//! Event batches as SGLang writes them from 0.5.20 on: maps, signed 64-bit hashes, one page per `BlockStored`.

use router_events::wire::{EventBatch, KvEvent, Stored};

type Result = std::result::Result<(), rmp::encode::ValueWriteError>;

/// Encodes a batch.
pub(crate) fn encode(batch: &EventBatch) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    // Writing to a Vec cannot fail.
    let _infallible = encode_into(batch, &mut out);
    out
}

fn encode_into(batch: &EventBatch, out: &mut Vec<u8>) -> Result {
    use rmp::encode as put;
    let pages = |event: &KvEvent| match event {
        KvEvent::Stored(stored) => stored.hashes.len(),
        KvEvent::Removed(_) | KvEvent::Cleared => 1,
        KvEvent::Moved(_) => 0,
    };
    put::write_array_len(out, 3)?;
    put::write_f64(out, batch.timestamp)?;
    put::write_array_len(out, batch.events.iter().map(pages).sum::<usize>() as u32)?;
    for event in &batch.events {
        match event {
            KvEvent::Stored(stored) => encode_pages(stored, out)?,
            KvEvent::Removed(removed) => {
                head(out, 3, "BlockRemoved")?;
                put::write_str(out, "block_hashes")?;
                put::write_array_len(out, removed.hashes.len() as u32)?;
                removed.hashes.iter().try_for_each(|&hash| put::write_sint(out, hash as i64).map(drop))?;
                put::write_str(out, "medium")?;
                put::write_str(out, "GPU")?;
            }
            KvEvent::Cleared => head(out, 1, "AllBlocksCleared")?,
            KvEvent::Moved(_) => {}
        }
    }
    match batch.rank {
        Some(rank) => put::write_uint(out, rank.into()).map(drop),
        None => nil(out),
    }
}

fn nil(out: &mut Vec<u8>) -> Result {
    rmp::encode::write_nil(out).map_err(rmp::encode::ValueWriteError::InvalidMarkerWrite)
}

fn head(out: &mut Vec<u8>, fields: u32, kind: &str) -> Result {
    rmp::encode::write_map_len(out, fields)?;
    rmp::encode::write_str(out, "type")?;
    rmp::encode::write_str(out, kind)
}

fn encode_pages(stored: &Stored, out: &mut Vec<u8>) -> Result {
    use rmp::encode as put;
    let mut parent = stored.parent;
    for (&hash, tokens) in stored.hashes.iter().zip(stored.tokens.chunks_exact(stored.block_tokens.max(1))) {
        let salt = stored.extras.iter().find(|_| parent.is_none());
        head(out, 7 + u32::from(salt.is_some()), "BlockStored")?;
        put::write_str(out, "block_hashes")?;
        put::write_array_len(out, 1)?;
        put::write_sint(out, hash as i64)?;
        put::write_str(out, "parent_block_hash")?;
        match parent {
            Some(parent) => drop(put::write_sint(out, parent as i64)?),
            None => nil(out)?,
        }
        put::write_str(out, "token_ids")?;
        put::write_array_len(out, tokens.len() as u32)?;
        tokens.iter().try_for_each(|&id| put::write_uint(out, id.into()).map(drop))?;
        put::write_str(out, "block_size")?;
        put::write_uint(out, stored.block_tokens as u64)?;
        put::write_str(out, "lora_id")?;
        nil(out)?;
        put::write_str(out, "medium")?;
        put::write_str(out, "GPU")?;
        if let Some((_, salt)) = salt {
            put::write_str(out, "cache_salt")?;
            put::write_str(out, salt)?;
        }
        parent = Some(hash);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use router_events::wire::{Removed, decode};
    use router_radix::Tier;

    use super::*;

    #[test]
    fn the_decoder_reads_what_is_written() {
        let stored = Stored {
            hashes: vec![u64::MAX - 3, 7],
            parent: Some(1 << 63),
            tokens: vec![1, 2, 300, 70_000],
            block_tokens: 2,
            ..Stored::default()
        };
        let removed = KvEvent::Removed(Removed { hashes: vec![u64::MAX], tier: Tier::Device, group: None });
        let events = vec![KvEvent::Stored(stored.clone()), removed.clone(), KvEvent::Cleared];
        let batch = EventBatch { timestamp: 1.5, events, rank: Some(0), ..EventBatch::default() };
        let read = decode(&encode(&batch)).expect("decodes");
        let page = |at: usize, parent| {
            let tokens = stored.tokens[at * 2..at * 2 + 2].to_vec();
            KvEvent::Stored(Stored { hashes: vec![stored.hashes[at]], parent, tokens, ..stored.clone() })
        };
        let expected =
            vec![page(0, stored.parent), page(1, Some(stored.hashes[0])), removed, KvEvent::Cleared];
        assert_eq!((read.events, read.broken.len(), read.rank), (expected, 0, Some(0)));
    }
}
