//! Event batches in msgpack.
//!
//! A batch is always an array `[timestamp, [events], rank?]`. An event is an array headed by its name (vLLM up
//! to 0.23, SGLang up to 0.5.18) or a map with a `type` key (later ones). Fields were appended over the
//! releases; what is not there is absent, what is not known is skipped, and an unknown event does not spoil
//! the others. Block hashes are integers (signed or not) or byte strings, of which the low 64 bits count, as
//! engines themselves shorten them.

use rmp::Marker;

use crate::msgpack::Reader;

/// An engine's own name for a block: only a key for its removal and its children.
pub type EngineHash = u64;

/// Where a block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Tier {
    /// GPU memory.
    #[default]
    Device,
    /// Host memory.
    Host,
    /// A local disk.
    Disk,
    /// Anything further away.
    Remote,
}

impl Tier {
    fn from_medium(medium: &str) -> Self {
        match medium {
            "GPU" => Self::Device,
            "CPU" | "CPU_PINNED" => Self::Host,
            "STORAGE" | "DISK" => Self::Disk,
            _ => Self::Remote,
        }
    }

    /// As vLLM writes it.
    #[must_use]
    pub fn medium(self) -> &'static str {
        match self {
            Self::Device => "GPU",
            Self::Host => "CPU",
            Self::Disk => "STORAGE",
            Self::Remote => "EXTERNAL",
        }
    }
}

/// Blocks that are now held.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stored {
    /// The blocks, each the child of the one before.
    pub hashes: Vec<EngineHash>,
    /// The block before the first; `None` at the start of a chain.
    pub parent: Option<EngineHash>,
    /// Tokens of all blocks.
    pub tokens: Vec<u32>,
    /// Tokens of one block.
    pub block_tokens: usize,
    /// Where.
    pub tier: Tier,
    /// What else went into the first block's hash: LoRA name, cache salt, multimodal ids.
    pub extras: Vec<String>,
    /// Which group of layers, on engines that have several.
    pub group: Option<u32>,
    /// False for groups of sliding-window or linear attention, which say nothing about whole prefixes.
    pub is_full_attention: bool,
}

/// Blocks that are gone.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Removed {
    /// The blocks.
    pub hashes: Vec<EngineHash>,
    /// From where.
    pub tier: Tier,
    /// From which group of layers.
    pub group: Option<u32>,
}

/// One event.
#[derive(Debug, Clone, PartialEq)]
pub enum KvEvent {
    /// Blocks are held.
    Stored(Stored),
    /// Blocks are gone.
    Removed(Removed),
    /// Everything is gone.
    Cleared,
}

/// What one message carries.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EventBatch {
    /// Unix time.
    pub timestamp: f64,
    /// In order.
    pub events: Vec<KvEvent>,
    /// Data-parallel rank, if the engine names it.
    pub rank: Option<u32>,
    /// Events of unknown kinds that were skipped.
    pub skipped: usize,
}

/// The bytes are not an event batch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not an event batch: {0}")]
pub struct WireError(pub(crate) &'static str);

type Result<T> = std::result::Result<T, WireError>;

/// Decodes one payload.
pub fn decode(payload: &[u8]) -> Result<EventBatch> {
    let mut reader = Reader(payload);
    let fields = reader.array()?.ok_or(WireError("the batch is not an array"))?;
    if fields < 2 {
        return Err(WireError("the batch has fewer than two fields"));
    }
    let timestamp = reader.number()?;
    let count = reader.array()?.ok_or(WireError("the events are not an array"))?;
    let mut batch = EventBatch { timestamp, ..EventBatch::default() };
    for _ in 0..count {
        // Delimited first: whatever is odd about one event, the next one begins where it ends.
        let from = reader.0;
        reader.skip()?;
        let bytes = &from[..from.len() - reader.0.len()];
        match event(&mut Reader(bytes)) {
            Ok(Some(event)) => batch.events.push(event),
            // A lost "stored" costs a hit; a lost removal would be a lie, and spoils the batch.
            Err(error) if mentions_removal(bytes) => return Err(error),
            Ok(None) | Err(_) => batch.skipped += 1,
        }
    }
    if fields > 2 {
        batch.rank = reader.integer()?.and_then(|rank| u32::try_from(rank).ok());
    }
    Ok(batch)
}

fn mentions_removal(event: &[u8]) -> bool {
    let found = |name: &[u8]| event.windows(name.len()).any(|window| window == name);
    found(b"BlockRemoved") || found(b"AllBlocksCleared")
}

const STORED_FIELDS: [&str; 11] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
/// Tuples within tuples that are looked into.
const NESTED_MAX: u8 = 4;
const REMOVED_FIELDS: [&str; 3] = ["block_hashes", "medium", "group_idx"];

/// Fields of any event, collected before its kind is known: a map may name it last.
#[derive(Default)]
struct Fields {
    stored: Stored,
    parent_seen: bool,
    cache_salt: Option<String>,
    lora_name: Option<String>,
    kind: Option<String>,
    group: Option<u32>,
}

fn event(reader: &mut Reader<'_>) -> Result<Option<KvEvent>> {
    let mut fields = Fields::default();
    fields.stored.is_full_attention = true;
    let mut name = String::new();
    if let Some(len) = reader.array()? {
        if len == 0 {
            return Ok(None);
        }
        name = reader.text()?.ok_or(WireError("an event's name is not a string"))?;
        let order: &[&str] = match name.as_str() {
            "BlockStored" => &STORED_FIELDS,
            "BlockRemoved" => &REMOVED_FIELDS,
            _ => &[],
        };
        for index in 0..len as usize - 1 {
            // SGLang 0.5.18 appends a map of further fields where vLLM has its lora_name.
            if let (Some(pairs), true) = (reader.peek_map(), index >= 6) {
                reader.map()?;
                for _ in 0..pairs {
                    let key = reader.text()?.unwrap_or_default();
                    fields.read(&key, reader)?;
                }
                continue;
            }
            fields.read(order.get(index).copied().unwrap_or(""), reader)?;
        }
    } else if let Some(len) = reader.map()? {
        for _ in 0..len {
            let key = reader.text()?.ok_or(WireError("an event's key is not a string"))?;
            match key.as_str() {
                "type" => name = reader.text()?.unwrap_or_default(),
                other => fields.read(other, reader)?,
            }
        }
    } else {
        reader.skip()?;
        return Ok(None);
    }
    fields.finish(&name)
}

impl Fields {
    fn read(&mut self, name: &str, reader: &mut Reader<'_>) -> Result<()> {
        match name {
            "block_hashes" => {
                let count = reader.array()?.ok_or(WireError("block_hashes is not an array"))?;
                for _ in 0..count {
                    let hash =
                        reader.hash()?.ok_or(WireError("a block hash is neither integer nor bytes"))?;
                    self.stored.hashes.push(hash);
                }
            }
            "parent_block_hash" => {
                self.stored.parent = reader.hash()?;
                self.parent_seen = true;
            }
            "token_ids" => self.tokens(reader)?,
            "block_size" => {
                let size = reader.integer()?.and_then(|size| usize::try_from(size).ok());
                self.stored.block_tokens = size.ok_or(WireError("block_size is not a count"))?;
            }
            "group_idx" => self.group = reader.integer()?.and_then(|group| u32::try_from(group).ok()),
            "medium" => {
                if let Some(medium) = reader.text()? {
                    self.stored.tier = Tier::from_medium(&medium);
                }
            }
            "lora_name" => self.lora_name = reader.text()?,
            "cache_salt" => self.cache_salt = reader.text()?,
            "extra_keys" => self.extra_keys(reader)?,
            "kv_cache_spec_kind" => self.kind = reader.text()?,
            _ => reader.skip()?,
        }
        Ok(())
    }

    /// Token ids, or pairs of them (EAGLE bigrams), of which the first counts.
    fn tokens(&mut self, reader: &mut Reader<'_>) -> Result<()> {
        let bad = WireError("a token id is not an integer");
        let count = reader.array()?.ok_or(WireError("token_ids is not an array"))?;
        for _ in 0..count {
            let id = match reader.array()? {
                None => reader.integer()?,
                Some(0) => None,
                Some(pair) => {
                    let first = reader.integer()?;
                    (1..pair).try_for_each(|_| reader.skip())?;
                    first
                }
            };
            self.stored.tokens.push(id.and_then(|id| u32::try_from(id).ok()).ok_or(bad.clone())?);
        }
        Ok(())
    }

    /// A list with nil or a list for each block; the first block's texts are kept.
    fn extra_keys(&mut self, reader: &mut Reader<'_>) -> Result<()> {
        let Some(count) = reader.array()? else { return reader.skip() };
        for block in 0..count {
            match reader.array()? {
                Some(len) if block == 0 => {
                    for _ in 0..len {
                        self.extra_key(reader, NESTED_MAX)?;
                    }
                }
                Some(len) => (0..len).try_for_each(|_| reader.skip())?,
                None => reader.skip()?,
            }
        }
        Ok(())
    }

    /// One key: a text, or a tuple that holds some. `depth` bounds the recursion: the bytes are not ours.
    fn extra_key(&mut self, reader: &mut Reader<'_>, depth: u8) -> Result<()> {
        if depth == 0 {
            return reader.skip();
        }
        if let Some(nested) = reader.array()? {
            return (0..nested).try_for_each(|_| self.extra_key(reader, depth - 1));
        }
        match reader.peek()? {
            Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => {
                self.stored.extras.extend(reader.text()?);
            }
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn finish(mut self, name: &str) -> Result<Option<KvEvent>> {
        match name {
            "BlockStored" => {
                if self.stored.hashes.is_empty() || !self.parent_seen || self.stored.block_tokens == 0 {
                    return Err(WireError("a BlockStored lacks hashes, parent or block size"));
                }
                if self.stored.extras.is_empty() {
                    self.stored.extras.extend(self.lora_name.into_iter().chain(self.cache_salt));
                }
                self.stored.is_full_attention =
                    self.kind.is_none_or(|kind| kind.contains("full") || kind.contains("mla"));
                self.stored.group = self.group;
                Ok(Some(KvEvent::Stored(self.stored)))
            }
            "BlockRemoved" => Ok(Some(KvEvent::Removed(Removed {
                hashes: self.stored.hashes,
                tier: self.stored.tier,
                group: self.group,
            }))),
            "AllBlocksCleared" => Ok(Some(KvEvent::Cleared)),
            _ => Ok(None),
        }
    }
}

/// Encodes a batch as vLLM 0.32 does: maps, the first seven keys of a `BlockStored` always there.
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
                put::write_str(out, removed.tier.medium())?;
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
    put::write_map_len(out, if stored.extras.is_empty() { 8 } else { 9 })?;
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
    put::write_str(out, stored.tier.medium())?;
    put::write_str(out, "lora_name")?;
    nil(out)?;
    if !stored.extras.is_empty() {
        put::write_str(out, "extra_keys")?;
        put::write_array_len(out, stored.hashes.len() as u32)?;
        put::write_array_len(out, stored.extras.len() as u32)?;
        stored.extras.iter().try_for_each(|extra| put::write_str(out, extra))?;
        (1..stored.hashes.len()).try_for_each(|_| nil(out))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> EventBatch {
        let stored = Stored {
            hashes: vec![1, u64::MAX],
            parent: Some(7),
            tokens: (0..32).collect(),
            block_tokens: 16,
            tier: Tier::Device,
            extras: Vec::new(),
            group: None,
            is_full_attention: true,
        };
        let salted = Stored { parent: None, extras: vec!["salt".into()], tier: Tier::Host, ..stored.clone() };
        EventBatch {
            timestamp: 1.5,
            events: vec![
                KvEvent::Stored(stored),
                KvEvent::Stored(salted),
                KvEvent::Removed(Removed { hashes: vec![9], tier: Tier::Host, group: None }),
                KvEvent::Cleared,
            ],
            rank: Some(3),
            skipped: 0,
        }
    }

    #[test]
    fn batches_come_back_as_they_went() {
        let batch = sample();
        assert_eq!(decode(&encode(&batch)), Ok(batch.clone()));
        let unranked = EventBatch { rank: None, ..batch };
        assert_eq!(decode(&encode(&unranked)), Ok(unranked));
    }

    /// A batch of one event, given as its bytes, between two good ones.
    fn around(odd: &[u8]) -> Vec<u8> {
        let good = encode(&EventBatch { events: vec![KvEvent::Cleared], ..EventBatch::default() });
        // array(3), f64, array(1), event, nil
        let event = &good[11..good.len() - 1];
        let mut bytes = good[..10].to_vec();
        bytes.push(0x93);
        bytes.extend([event, odd, event].concat());
        bytes.push(0xC0);
        bytes
    }

    #[test]
    fn an_odd_event_does_not_spoil_its_neighbours() {
        let unknown_map = [
            0x82, 0xA4, b't', b'y', b'p', b'e', 0xA1, b'X', 0xAA, b'b', b'l', b'o', b'c', b'k', b'_', b's',
            b'i', b'z', b'e', 0xC0,
        ];
        let number_for_text =
            [0x82, 0xA4, b't', b'y', b'p', b'e', 0xA1, b'X', 0xA6, b'm', b'e', b'd', b'i', b'u', b'm', 0x05];
        let mut deep = vec![0x81, 0xAA];
        deep.extend(b"extra_keys");
        deep.extend(vec![0x91; 1_000_000]);
        deep.push(0x01);
        for odd in [&[0x05][..], &[0x90], &unknown_map, &number_for_text, &deep] {
            let batch = decode(&around(odd)).expect("the batch is good");
            assert_eq!((batch.events.len(), batch.skipped), (2, 1));
        }
        let broken_removal = [&[0x92, 0xAC][..], b"BlockRemoved", &[0x05]].concat();
        assert!(decode(&around(&broken_removal)).is_err(), "a removal must not be lost in silence");
    }

    #[test]
    fn cut_and_mutated_batches_never_panic() {
        let bytes = encode(&sample());
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len]).is_err(), "cut at {len}");
        }
        let mut random = 5_u64;
        let mut decoded = 0;
        for _ in 0..50_000 {
            let mut mutated = bytes.clone();
            for _ in 0..2 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let at = random as usize % mutated.len();
                mutated[at] = (random >> 32) as u8;
            }
            decoded += usize::from(decode(&mutated).is_ok());
        }
        assert!(decoded > 0, "some mutations only change values");
    }
}
