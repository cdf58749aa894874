//! Event batches of vLLM and SGLang in msgpack.
//!
//! A batch is always an array `[timestamp, [events], rank?]`. An event is an array headed by its name (vLLM up to 0.23,
//! SGLang up to 0.5.18) or a map with a `type` key (later ones). Releases have appended fields; missing fields are absent,
//! unknown ones are skipped, and an unknown event does not affect the others. Block hashes are integers (signed or not) or
//! byte strings, of which the low 64 bits count, as engines themselves shorten them.
//!
//! Kvasir's own workers send [`Stored::routing_hashes`] in place of token ids, in one further key of the map
//! (`kvasir_routing_hashes`) beside empty `token_ids`: decoders of structs with named keys, vLLM's among them, ignore unknown
//! ones, so the event stays valid for them, without its tokens.

use router_radix::Tier;

pub use crate::encode::encode;
use crate::error::WireError;
use crate::msgpack::Reader;

pub use router_radix::EngineHash;

/// Tier of an engine's medium.
fn tier_of(medium: &str) -> Tier {
    match medium {
        "GPU" => Tier::Device,
        "CPU" | "CPU_PINNED" => Tier::Host,
        "STORAGE" | "DISK" => Tier::Disk,
        _ => Tier::Remote,
    }
}

/// Medium of a tier, as vLLM writes it.
#[must_use]
pub fn medium_of(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "GPU",
        Tier::Host => "CPU",
        Tier::Disk => "STORAGE",
        Tier::Remote => "EXTERNAL",
    }
}

/// Event: blocks are stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// Hashes of the blocks, each the child of the one before.
    pub hashes: Vec<EngineHash>,
    /// Hash of the block before the first; `None` at the start of a chain.
    pub parent: Option<EngineHash>,
    /// Tokens of all blocks; empty if `routing_hashes` replace them.
    pub tokens: Vec<u32>,
    /// Hashes under which routing looks up the blocks (`kvstore_block::block_hashes`), one per block, with everything mixed in
    /// that belongs to a block. Empty from engines that send tokens.
    pub routing_hashes: Vec<u64>,
    /// Tokens of one block.
    pub block_tokens: usize,
    /// Tier that holds the blocks.
    pub tier: Tier,
    /// Extra keys of the blocks' hashes, each with its block's index in this event: LoRA name, cache salt, multimodal ids,
    /// without distinction.
    pub extras: Vec<(u32, String)>,
    /// Name of the LoRA adapter, or `lora_id:` and its number from engines that send no name.
    pub lora: Option<String>,
    /// The cache salt, from engines that send it as a separate field.
    pub cache_salt: Option<String>,
    /// Number of the group of layers, on engines that have several.
    pub group: Option<u32>,
    /// Whether the group has full attention. Sliding-window and linear attention do not cover whole prefixes.
    pub is_full_attention: bool,
}

/// Event: blocks are removed.
#[derive(Debug, Clone, PartialEq)]
pub struct Removed {
    /// Hashes of the blocks.
    pub hashes: Vec<EngineHash>,
    /// Tier that held the blocks.
    pub tier: Tier,
    /// Number of the group of layers.
    pub group: Option<u32>,
}

/// Event: blocks moved to another tier, named by their hashes only.
#[derive(Debug, Clone, PartialEq)]
pub struct Moved {
    /// Hashes of the blocks.
    pub hashes: Vec<EngineHash>,
    /// Tier that held the blocks before.
    pub from: Tier,
    /// Tier that holds the blocks now.
    pub to: Tier,
}

impl Default for Stored {
    fn default() -> Self {
        Self {
            hashes: Vec::new(),
            parent: None,
            tokens: Vec::new(),
            routing_hashes: Vec::new(),
            block_tokens: 0,
            tier: Tier::Device,
            extras: Vec::new(),
            lora: None,
            cache_salt: None,
            group: None,
            is_full_attention: true,
        }
    }
}

/// One event.
#[derive(Debug, Clone, PartialEq)]
pub enum KvEvent {
    /// Blocks are stored.
    Stored(Stored),
    /// Blocks are removed.
    Removed(Removed),
    /// Blocks moved to another tier.
    Moved(Moved),
    /// All blocks are removed.
    Cleared,
}

/// Content of one message.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EventBatch {
    /// Unix time in seconds.
    pub timestamp: f64,
    /// Decoded events, in their order.
    pub events: Vec<KvEvent>,
    /// Data-parallel rank, if the engine sends it.
    pub rank: Option<u32>,
    /// Number of skipped events of unknown kinds.
    pub skipped: usize,
    /// Events that could not be read, beside the decoded ones.
    pub broken: Vec<Broken>,
}

/// An event that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// Decoding error of the event.
    pub error: WireError,
    /// Whether the event may have been a removal: the index may then hold too many blocks of the publisher. A lost "stored" only
    /// costs a hit.
    pub may_remove: bool,
}

type Result<T> = std::result::Result<T, WireError>;

/// Decodes one payload. An error means that the payload is no batch or ends too early; an invalid event is in
/// [`EventBatch::broken`].
pub fn decode(payload: &[u8]) -> Result<EventBatch> {
    let mut reader = Reader::new(payload);
    let no_batch = reader.bad("the batch is not an array");
    let fields = reader.array()?.ok_or(no_batch)?;
    if fields < 2 {
        return Err(reader.bad("the batch has fewer than two fields"));
    }
    let timestamp = reader.number()?;
    let no_events = reader.bad("the events are not an array");
    let count = reader.array()?.ok_or(no_events)?;
    let mut batch = EventBatch { timestamp, ..EventBatch::default() };
    batch.events.reserve(count.min(payload.len() / 8));
    for number in 0..count {
        let named = |error: WireError| WireError { event: Some(number), ..error };
        let start = reader;
        let outcome = event(&mut reader);
        if let Ok(Some(event)) = outcome {
            // Every field was read whole: the next event begins here.
            batch.events.push(event);
            continue;
        }
        // After an invalid event, decoding continues at its end.
        reader = start;
        let (_, bytes) = reader.delimited().map_err(named)?;
        match outcome {
            Ok(_) => batch.skipped += 1,
            Err(error) => {
                let may_remove = !mentions(bytes, b"BlockStored");
                batch.broken.push(Broken { error: named(error), may_remove });
            }
        }
    }
    if fields > 2 {
        batch.rank = reader.integer()?.and_then(|rank| u32::try_from(rank).ok());
    }
    Ok(batch)
}

fn mentions(event: &[u8], name: &[u8]) -> bool {
    event.windows(name.len()).any(|window| window == name)
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
/// Keys of maps that have no place in the array form: SGLang's, and Kvasir's own.
const NAMED_FIELDS: [&str; 2] = ["cache_salt", ROUTING_HASHES];
/// Kvasir's own key of a `BlockStored`.
pub(crate) const ROUTING_HASHES: &str = "kvasir_routing_hashes";
const REMOVED_FIELDS: [&str; 3] = ["block_hashes", "medium", "group_idx"];
/// Largest depth of nested tuples that are read.
const NESTED_MAX: u8 = 4;

/// Fields of any event, collected before its kind is known: a map may name it last.
#[derive(Default)]
struct Fields {
    stored: Stored,
    parent_seen: bool,
    lora_id: Option<i64>,
    kind: Option<String>,
}

fn event(reader: &mut Reader<'_>) -> Result<Option<KvEvent>> {
    let mut fields = Fields::default();
    let mut name = "";
    if let Some(len) = reader.array()? {
        if len == 0 {
            return Ok(None);
        }
        let no_name = reader.bad("an event's name is not a string");
        name = reader.text()?.ok_or(no_name)?;
        let order: &[&'static str] = match name {
            "BlockStored" => &STORED_FIELDS,
            "BlockRemoved" => &REMOVED_FIELDS,
            "AllBlocksCleared" => &[],
            _ => return Ok(None),
        };
        for index in 0..len - 1 {
            // SGLang 0.5.18 appends a map of further fields where vLLM has its lora_name.
            if index >= 6
                && let Some(pairs) = reader.map()?
            {
                fields.read_pairs(reader, pairs)?;
                continue;
            }
            fields.read(order.get(index).copied().unwrap_or(""), reader)?;
        }
    } else if let Some(len) = reader.map()? {
        // The kind is read first, wherever it is: an unknown event may have anything in fields of known names.
        let mut ahead = *reader;
        for _ in 0..len {
            let no_key = ahead.bad("a key is not a string");
            if ahead.text()?.ok_or(no_key)? == "type" {
                let no_name = ahead.bad("an event's type is not a string");
                name = ahead.text()?.ok_or(no_name)?;
                break;
            }
            ahead.skip()?;
        }
        if !matches!(name, "BlockStored" | "BlockRemoved" | "AllBlocksCleared") {
            return Ok(None);
        }
        fields.read_pairs(reader, len)?;
    } else {
        return Ok(None);
    }
    let at = reader.position();
    fields.finish(name).map_err(|what| WireError { what, at, event: None, field: None })
}

impl Fields {
    fn read_pairs(&mut self, reader: &mut Reader<'_>, pairs: usize) -> Result<()> {
        for _ in 0..pairs {
            let no_key = reader.bad("a key is not a string");
            let key = reader.text()?.ok_or(no_key)?;
            self.read(key, reader)?;
        }
        Ok(())
    }

    fn read(&mut self, name: &str, reader: &mut Reader<'_>) -> Result<()> {
        let known = STORED_FIELDS.iter().chain(&NAMED_FIELDS).find(|field| **field == name).copied();
        self.read_known(known, reader).map_err(|error| WireError { field: known, ..error })
    }

    fn read_known(&mut self, name: Option<&'static str>, reader: &mut Reader<'_>) -> Result<()> {
        match name.unwrap_or_default() {
            "block_hashes" => {
                let no_array = reader.bad("not an array");
                let count = reader.array()?.ok_or(no_array)?;
                self.stored.hashes.reserve(count);
                for _ in 0..count {
                    let no_hash = reader.bad("a block hash is neither integer nor bytes");
                    self.stored.hashes.push(reader.hash()?.ok_or(no_hash)?);
                }
            }
            "parent_block_hash" => {
                let (mut value, bytes) = reader.delimited()?;
                self.stored.parent = value.hash()?;
                if self.stored.parent.is_none() && bytes != [0xC0] {
                    return Err(reader.bad("neither integer, bytes nor nil"));
                }
                self.parent_seen = true;
            }
            "token_ids" => self.tokens(reader)?,
            ROUTING_HASHES => {
                let no_array = reader.bad("not an array");
                let count = reader.array()?.ok_or(no_array)?;
                self.stored.routing_hashes.reserve(count);
                for _ in 0..count {
                    let no_hash = reader.bad("a routing hash is not an integer");
                    self.stored.routing_hashes.push(reader.hash()?.ok_or(no_hash)?);
                }
            }
            "block_size" => {
                let no_count = reader.bad("not a count");
                let size = reader.integer()?.and_then(|size| usize::try_from(size).ok());
                self.stored.block_tokens = size.ok_or(no_count)?;
            }
            "lora_id" => self.lora_id = optional(reader, Reader::integer)?,
            "group_idx" => {
                self.stored.group =
                    optional(reader, Reader::integer)?.and_then(|group| u32::try_from(group).ok());
            }
            "medium" => {
                if let Some(medium) = reader.delimited()?.0.text()? {
                    self.stored.tier = tier_of(medium);
                }
            }
            "lora_name" => self.stored.lora = reader.delimited()?.0.text()?.map(str::to_owned),
            "cache_salt" => self.stored.cache_salt = reader.delimited()?.0.text()?.map(str::to_owned),
            "extra_keys" => self.extra_keys(reader)?,
            "kv_cache_spec_kind" => self.kind = reader.delimited()?.0.text()?.map(str::to_owned),
            _ => reader.skip()?,
        }
        Ok(())
    }

    /// Token ids, or pairs of them (EAGLE bigrams), of which the first counts.
    fn tokens(&mut self, reader: &mut Reader<'_>) -> Result<()> {
        let no_array = reader.bad("not an array");
        let count = reader.array()?.ok_or(no_array)?;
        self.stored.tokens.reserve(count);
        for _ in 0..count {
            if let Some(id) = reader.token() {
                self.stored.tokens.push(id);
                continue;
            }
            let no_id = reader.bad("a token id is not an unsigned 32-bit integer");
            let id = match reader.array()? {
                None => reader.integer()?,
                Some(0) => None,
                Some(pair) => {
                    let first = reader.integer()?;
                    (1..pair).try_for_each(|_| reader.skip())?;
                    first
                }
            };
            self.stored.tokens.push(id.and_then(|id| u32::try_from(id).ok()).ok_or(no_id)?);
        }
        Ok(())
    }

    /// A list with nil or a list for each block; texts are kept.
    fn extra_keys(&mut self, reader: &mut Reader<'_>) -> Result<()> {
        let Some(count) = reader.array()? else { return reader.skip() };
        for block in 0..count {
            let (mut keys, _) = reader.delimited()?;
            for _ in 0..keys.array()?.unwrap_or(0) {
                self.extra_key(&mut keys, block as u32, NESTED_MAX)?;
            }
        }
        Ok(())
    }

    /// Reads one key: a text, or a tuple that holds some. `depth` bounds the recursion, since the bytes are not trusted.
    fn extra_key(&mut self, reader: &mut Reader<'_>, block: u32, depth: u8) -> Result<()> {
        if depth == 0 {
            return reader.skip();
        }
        if let Some(nested) = reader.array()? {
            return (0..nested).try_for_each(|_| self.extra_key(reader, block, depth - 1));
        }
        if !reader.is_text() {
            return reader.skip();
        }
        self.stored.extras.extend(reader.text()?.map(|text| (block, text.to_owned())));
        Ok(())
    }

    fn finish(mut self, name: &str) -> std::result::Result<Option<KvEvent>, &'static str> {
        match name {
            "BlockStored" => {
                // vLLM's connectors report blocks that their tiers have gained by hashes alone; their tokens were sent before.
                let is_named_only = self.stored.tokens.is_empty() && self.stored.routing_hashes.is_empty();
                let has_size = self.stored.block_tokens > 0 || is_named_only;
                if self.stored.hashes.is_empty() || !self.parent_seen || !has_size {
                    return Err("a BlockStored lacks hashes, parent or block size");
                }
                if self.stored.lora.is_none() {
                    self.stored.lora = self.lora_id.map(|id| format!("lora_id:{id}"));
                }
                // vLLM: full_attention, mla_attention, sink_full_attention …; sliding_window, sliding_window_mla, mamba …
                self.stored.is_full_attention = self.kind.is_none_or(|kind| {
                    !kind.contains("window") && (kind.contains("full") || kind.contains("mla"))
                });
                Ok(Some(KvEvent::Stored(self.stored)))
            }
            "BlockRemoved" => Ok(Some(KvEvent::Removed(Removed {
                hashes: self.stored.hashes,
                tier: self.stored.tier,
                group: self.stored.group,
            }))),
            "AllBlocksCleared" => Ok(Some(KvEvent::Cleared)),
            _ => Ok(None),
        }
    }
}

/// Reads a value that is left out when it is of another kind, so that a field with a changed meaning is ignored.
fn optional<'a, T>(
    reader: &mut Reader<'a>,
    read: impl FnOnce(&mut Reader<'a>) -> Result<Option<T>>,
) -> Result<Option<T>> {
    let (mut value, _) = reader.delimited()?;
    read(&mut value)
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
            ..Stored::default()
        };
        let extras = vec![(0, "salt".into()), (1, "image".into()), (1, "other".into())];
        let salted = Stored { parent: None, extras, tier: Tier::Host, ..stored.clone() };
        let lora = Stored { lora: Some("a".into()), cache_salt: Some("b".into()), ..stored.clone() };
        let named =
            Stored { parent: None, tokens: Vec::new(), block_tokens: 0, tier: Tier::Disk, ..stored.clone() };
        let hashed = Stored { tokens: Vec::new(), routing_hashes: vec![3, u64::MAX - 1], ..stored.clone() };
        EventBatch {
            timestamp: 1.5,
            events: vec![
                KvEvent::Stored(stored),
                KvEvent::Stored(salted),
                KvEvent::Stored(lora),
                KvEvent::Stored(hashed),
                KvEvent::Stored(named),
                KvEvent::Removed(Removed { hashes: vec![9], tier: Tier::Host, group: None }),
                KvEvent::Cleared,
            ],
            rank: Some(3),
            skipped: 0,
            broken: Vec::new(),
        }
    }

    #[test]
    fn batches_come_back_as_they_went() {
        let batch = sample();
        assert_eq!(decode(&encode(&batch)), Ok(batch.clone()));
        let unranked = EventBatch { rank: None, ..batch };
        assert_eq!(decode(&encode(&unranked)), Ok(unranked));
    }

    /// Returns a batch of one event, given as its bytes, between two valid ones.
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
    fn windows_say_nothing_about_whole_prefixes() {
        for (kind, is_full) in [
            ("full_attention", true),
            ("mla_attention", true),
            ("sink_full_attention", true),
            ("sliding_window", false),
            ("sliding_window_mla", false),
            ("mamba", false),
        ] {
            let mut fields = Fields { parent_seen: true, kind: Some(kind.to_owned()), ..Fields::default() };
            (fields.stored.hashes, fields.stored.block_tokens) = (vec![1], 16);
            let event = fields.finish("BlockStored").expect("an event");
            let Some(KvEvent::Stored(stored)) = event else { panic!("{event:?}") };
            assert_eq!(stored.is_full_attention, is_full, "{kind}");
        }
    }

    #[test]
    fn an_odd_event_does_not_spoil_its_neighbours() {
        let unknown_map = [
            0x82, 0xA4, b't', b'y', b'p', b'e', 0xA1, b'X', 0xAA, b'b', b'l', b'o', b'c', b'k', b'_', b's',
            b'i', b'z', b'e', 0xC0,
        ];
        let number_for_text =
            [0x82, 0xA4, b't', b'y', b'p', b'e', 0xA1, b'X', 0xA6, b'm', b'e', b'd', b'i', b'u', b'm', 0x05];
        let mut deep = vec![0x82, 0xA4];
        deep.extend(b"type");
        deep.extend([0xA1, b'X', 0xAA]);
        deep.extend(b"extra_keys");
        deep.extend(vec![0x91; 1_000_000]);
        deep.push(0x01);
        for odd in [&[0x05][..], &[0x90], &unknown_map, &number_for_text, &deep] {
            let batch = decode(&around(odd)).expect("the batch is good");
            assert_eq!((batch.events.len(), batch.skipped, batch.broken.len()), (2, 1, 0));
        }
        let broken_removal = [&[0x92, 0xAC][..], b"BlockRemoved", &[0x05]].concat();
        let batch = decode(&around(&broken_removal)).expect("the batch is good");
        assert_eq!(batch.events.len(), 2, "later events are there");
        assert!(batch.broken[0].may_remove, "a removal must not be lost in silence");
        assert_eq!(batch.broken[0].error.to_string(), "event 1: block_hashes: not an array (byte 48)");
        let broken_store = [&[0x92, 0xAB][..], b"BlockStored", &[0x05]].concat();
        let batch = decode(&around(&broken_store)).expect("the batch is good");
        assert!(batch.events.len() == 2 && !batch.broken[0].may_remove);
    }

    #[test]
    fn cut_and_mutated_batches_never_panic() {
        let bytes = encode(&sample());
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len]).is_err(), "cut at {len}");
        }
        let mut random = fastrand::Rng::with_seed(5);
        let mut decoded = 0;
        for _ in 0..50_000 {
            let mut mutated = bytes.clone();
            for _ in 0..2 {
                let at = random.usize(..mutated.len());
                mutated[at] = random.u8(..);
            }
            decoded += usize::from(decode(&mutated).is_ok());
        }
        assert!(decoded > 0, "some mutations only change values");
    }
}
