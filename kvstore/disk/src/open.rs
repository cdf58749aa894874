//! Formatting and opening a store.
//!
//! Formatting writes headers only: the pages of a table carry the store's id, which is new each time, so the
//! pages of an earlier store do not match.
//!
//! Opening reads headers and tables, never payloads: those are verified when they are read. There is no checkpoint
//! of the index, as the tables are one already, read in order at full depth: 39 MB for 100 GB in slots of 1 MiB with
//! 128 meta bytes, 8 MB in slots of 5 MiB. Opening took 150 and 34 ms, 4 ns a table byte (`tests/recovery.rs`, two busy
//! cores); smaller slots have more records: 100 GB in slots of 4 KiB have 9.1 GB of tables.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_io::IoEngine;

use crate::format::{PAGE_BYTES, PageError, Record, RecordState, decode_record, is_blank, parse_record};
use crate::headers::{Headers, format_segments, later};
use crate::inspect::inspect;
use crate::layout::{PageCopy, SegmentLayout, plan};
use crate::log::release;
use crate::scan::{Extent, read_extents, scan_tables};
use crate::table::{SegmentTable, Tables};
use crate::{Area, ClockReading, DiskConfig, DiskCounters, DiskError, DiskLog, Usage};

/// A block that was recovered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recovered {
    /// Slot of the block.
    pub slot: u32,
    /// The block.
    pub identity: BlockIdentity,
    /// Identity of the preceding block of the chain.
    pub parent: BlockIdentity,
    /// Tenant whose quota the block counts against.
    pub tenant: u32,
    /// Number of the write that stored the block.
    pub generation: u64,
    /// Bytes of the payload.
    pub bytes: u32,
    /// Expected checksum of the payload.
    pub checksum: u64,
    /// Time of the write, in seconds since 1970.
    pub written_at_s: u32,
    /// Opaque bytes that the writer stored with the block.
    pub meta: Box<[u8]>,
}

/// Result of opening a store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecoveryReport {
    /// Whether the areas were formatted: they held no store, or one that `reformat` discarded.
    pub is_formatted: bool,
    /// Bytes of tables that were read.
    pub table_bytes: u64,
    /// Copies of table pages that were valid.
    pub pages_valid: u64,
    /// Copies that were damaged or could not be read.
    pub pages_damaged: u64,
    /// Header pages that had to be written again.
    pub headers_damaged: u32,
    /// Records whose checksum failed.
    pub records_damaged: u64,
    /// Records taken from pages of which no copy was whole.
    pub records_salvaged: u64,
    /// Older records of blocks that were found twice.
    pub duplicates: u64,
    /// Blocks found.
    pub recovered: u64,
    /// Time that opening took.
    pub elapsed: Duration,
}

/// Tables as read from the disk, before they are indexed.
struct Found {
    tables: Vec<SegmentTable>,
    usage: Usage,
    sequence: u64,
    report: RecoveryReport,
}

impl DiskLog {
    /// Formats the areas as an empty store. Their contents are lost, except for the count of bytes that the
    /// device was made to write. `store_id` must differ from the id of every earlier store in these areas: draw
    /// it at random. An engine with a request that hangs is leaked, as in [`DiskLog::close`].
    pub fn format(
        config: DiskConfig,
        areas: &[Area],
        mut engine: Box<dyn IoEngine>,
        store_id: u64,
        now: ClockReading,
    ) -> Result<Self, DiskError> {
        match plan_and_format(engine.as_mut(), &config, areas, store_id) {
            Ok((tables, usage)) => Ok(Self::assemble(config, engine, tables, usage, 1, now)),
            Err(error) => Err(give_up(engine, &config, error)),
        }
    }

    /// Finds the store in these areas, in the order in which they were formatted; further areas may follow and join
    /// it. Areas that are blank, or that may be reformatted, become an empty store with the id `store_id`.
    /// An engine with a request that hangs is leaked, as in [`DiskLog::close`].
    pub fn open(
        config: DiskConfig,
        areas: &[Area],
        mut engine: Box<dyn IoEngine>,
        store_id: u64,
        now: ClockReading,
    ) -> Result<(Self, Vec<Recovered>, RecoveryReport), DiskError> {
        let started = Instant::now();
        let (mut found, store_id) = match find(engine.as_mut(), &config, areas) {
            Ok(Some(found)) => found,
            Ok(None) => {
                let log = Self::format(config, areas, engine, store_id, now)?;
                let elapsed = started.elapsed();
                return Ok((
                    log,
                    Vec::new(),
                    RecoveryReport { is_formatted: true, elapsed, ..RecoveryReport::default() },
                ));
            }
            Err(error) => return Err(give_up(engine, &config, error)),
        };
        let mut tables = Tables::new(found.tables, store_id, found.sequence + 1);
        let (recovered, generation) = index(&mut tables, &mut found.report, now);
        let mut log = Self::assemble(config, engine, tables, found.usage, generation + 1, now);
        log.adopt_tables();
        let mut report = found.report;
        (report.recovered, report.elapsed) = (recovered.len() as u64, started.elapsed());
        DiskCounters::add(&log.counters.recovered, report.recovered);
        DiskCounters::add(&log.counters.dropped, report.records_damaged + report.duplicates);
        Ok((log, recovered, report))
    }
}

/// Reads the store's tables and id, and restores its headers; `None` when the areas are to be formatted.
fn find(
    engine: &mut dyn IoEngine,
    config: &DiskConfig,
    areas: &[Area],
) -> Result<Option<(Found, u64)>, DiskError> {
    let segments = plan(config, areas, engine.geometry())?;
    let Some(headers) = Headers::find(engine, config, &segments)? else { return Ok(None) };
    let mut found = scan(engine, config, &segments, &headers)?;
    found.report.headers_damaged = headers.restore(engine, config, &segments, found.sequence)?;
    Ok(Some((found, headers.store_id)))
}

/// Writes the headers of an empty store. Returns its tables, and the bytes that earlier stores made the device
/// write.
fn plan_and_format(
    engine: &mut dyn IoEngine,
    config: &DiskConfig,
    areas: &[Area],
    store_id: u64,
) -> Result<(Tables, Usage), DiskError> {
    let segments = plan(config, areas, engine.geometry())?;
    let usage = inspect(engine, areas, config.operation_timeout)?.usage;
    format_segments(engine, config, &segments, store_id, usage)?;
    let tables = Tables::new(segments.into_iter().map(SegmentTable::new).collect(), store_id, 1);
    Ok((tables, usage))
}

/// Releases an engine that could not be used. Does not wait after a timeout, else at most `operation_timeout`.
fn give_up(engine: Box<dyn IoEngine>, config: &DiskConfig, error: DiskError) -> DiskError {
    let patience = match error {
        DiskError::Timeout { .. } => Duration::ZERO,
        _ => config.operation_timeout,
    };
    release(engine, Instant::now() + patience);
    error
}

/// Reads all tables and keeps the newest whole copy of each page.
fn scan(
    engine: &mut dyn IoEngine,
    config: &DiskConfig,
    segments: &[SegmentLayout],
    headers: &Headers,
) -> Result<Found, DiskError> {
    let mut tables: Vec<SegmentTable> = segments.iter().copied().map(SegmentTable::new).collect();
    // Sequence of the copy that was taken for each page; 0 if none.
    let mut taken: Vec<Vec<u64>> = segments.iter().map(|segment| vec![0; segment.pages as usize]).collect();
    let mut damaged = Vec::new();
    let mut report = RecoveryReport::default();
    let (mut usage, mut sequence) = (headers.usage, headers.sequence);
    report.table_bytes =
        scan_tables(engine, config.operation_timeout, segments, headers.store_id, |found| {
            match found.state {
                Ok(header) => {
                    report.pages_valid += 1;
                    sequence = sequence.max(header.sequence);
                    usage = later(usage, header.usage);
                    let newest = &mut taken[found.segment][found.page as usize];
                    if let Some(bytes) = found.bytes.filter(|_| header.sequence > *newest) {
                        *newest = header.sequence;
                        take_page(&mut tables[found.segment], found.page, found.copy, bytes);
                    }
                }
                Err(PageError::Blank | PageError::Foreign) => {}
                Err(_) => {
                    report.pages_damaged += 1;
                    damaged.push((found.segment, found.page, found.copy));
                }
            }
        })?;
    damaged.retain(|&(segment, page, _)| taken[segment][page as usize] == 0);
    let mut found = Found { tables, usage, sequence, report };
    recover_records(engine, config.operation_timeout, headers.store_id, &damaged, &mut found)?;
    Ok(found)
}

fn take_page(table: &mut SegmentTable, page: u32, copy: PageCopy, bytes: &[u8]) {
    let start = page as usize * PAGE_BYTES;
    table.image[start..start + PAGE_BYTES].copy_from_slice(bytes);
    table.pages[page as usize].newest = copy;
}

/// Takes the records that verify on their own from pages of which no copy is whole.
fn recover_records(
    engine: &mut dyn IoEngine,
    timeout: Duration,
    store_id: u64,
    damaged: &[(usize, u32, PageCopy)],
    found: &mut Found,
) -> Result<(), DiskError> {
    for &(index, page, copy) in damaged {
        let table = &mut found.tables[index];
        let layout = table.layout;
        let extent =
            Extent { file: layout.area.file, offset: layout.table_offset(copy, page), bytes: PAGE_BYTES };
        read_extents(engine, "salvage records", timeout, std::iter::once(extent), |_, result| {
            let Ok(bytes) = result else { return };
            for slot in layout.slots_of(page) {
                let range = layout.record_range(slot);
                let start = range.start % PAGE_BYTES;
                let source = &bytes[start..start + range.len()];
                let Ok(Some(record)) = decode_record(source, layout.place(store_id, slot)) else { continue };
                let known = parse_record(&table.image[range.clone()]);
                // A tombstone has the generation of the write that it ends.
                let rank = |record: &Record| (record.generation, record.state == RecordState::Tombstone);
                if known.is_none_or(|known| rank(&known) < rank(&record)) {
                    table.image[range].copy_from_slice(source);
                    found.report.records_salvaged += u64::from(known.is_none());
                }
            }
        })?;
    }
    Ok(())
}

/// Checks each record, drops the older of two records of the same block, and lists the rest. Also returns the
/// latest generation.
fn index(tables: &mut Tables, report: &mut RecoveryReport, now: ClockReading) -> (Vec<Recovered>, u64) {
    let mut generation = 0;
    let mut newest: HashMap<BlockIdentity, (u32, u64)> = HashMap::new();
    let mut older = Vec::new();
    for segment in &mut tables.segments {
        let layout = segment.layout;
        for local in 0..layout.slots {
            let bytes = &mut segment.image[layout.record_range(local)];
            let record = match decode_record(bytes, layout.place(tables.store_id, local)) {
                Ok(None) => continue,
                Ok(Some(record)) if is_possible(&record, &layout) => record,
                _ => {
                    report.records_damaged += u64::from(!is_blank(bytes));
                    bytes.fill(0);
                    continue;
                }
            };
            generation = generation.max(record.generation);
            if record.state == RecordState::Tombstone {
                continue;
            }
            let this = (layout.slot_number(local), record.generation);
            match newest.entry(record.identity) {
                Entry::Vacant(entry) => {
                    entry.insert(this);
                }
                Entry::Occupied(mut entry) if entry.get().1 < record.generation => {
                    older.push(entry.insert(this).0);
                }
                Entry::Occupied(_) => older.push(this.0),
            }
        }
    }
    report.duplicates = older.len() as u64;
    for slot in older {
        tables.write_tombstone(slot, now.instant);
    }
    let recovered = (0..tables.slots()).filter_map(|slot| recover(tables, slot)).collect();
    (recovered, generation)
}

fn is_possible(record: &Record, layout: &SegmentLayout) -> bool {
    record.bytes > 0 && record.bytes <= layout.slot_bytes && record.meta_bytes <= layout.meta_bytes_max
}

fn recover(tables: &Tables, slot: u32) -> Option<Recovered> {
    let record = tables.live(slot)?;
    Some(Recovered {
        slot,
        identity: record.identity,
        parent: record.parent,
        tenant: record.tenant,
        generation: record.generation,
        bytes: record.bytes,
        checksum: record.checksum,
        written_at_s: record.written_at_s,
        meta: tables.meta(slot).into(),
    })
}
