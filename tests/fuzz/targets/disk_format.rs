//! Pages from a disk with arbitrary content: no panic, and a page that is read is written back equal.

#![no_main]

use kvstore_disk::format::{
    PAGE_BYTES, PageError, RECORD_BYTES, RECORDS_AT, RecordLocation, decode_page, decode_record,
    decode_segment_header, encode_record, encode_segment_header, parse_record, seal_page,
};

/// Returns the data as a page: truncated or zero-filled.
fn page_of(data: &[u8]) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    let len = data.len().min(PAGE_BYTES);
    page[..len].copy_from_slice(&data[..len]);
    page
}

/// Returns the page with a valid checksum, which a fuzzer cannot guess: `seal_page` writes the checksum and
/// the other header fields, whose fuzzed values are read back from a valid page.
fn sealed(mut page: [u8; PAGE_BYTES]) -> [u8; PAGE_BYTES] {
    let mut blank = [0; PAGE_BYTES];
    let kind = if page[0] & 1 == 0 {
        kvstore_disk::format::PageKind::Header
    } else {
        kvstore_disk::format::PageKind::Table
    };
    let long = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("8 bytes"));
    let header = kvstore_disk::format::PageHeader {
        kind,
        store_id: long(8),
        sequence: long(16),
        segment: long(24) as u32,
        page: (long(24) >> 32) as u32,
        usage: kvstore_disk::Usage {
            total_bytes: long(32),
            day_bytes: long(40),
            previous_day_bytes: long(48),
            day: long(56) as u32,
        },
    };
    blank[RECORDS_AT..].copy_from_slice(&page[RECORDS_AT..]);
    seal_page(&mut blank, &header);
    page = blank;
    match decode_page(&page) {
        Ok(read) => assert_eq!(read, header),
        Err(error) => assert!(error == PageError::Damaged && header.sequence > 1 << 62, "{error:?}"),
    }
    page
}

fn records(bytes: &[u8], place: RecordLocation) {
    for record_bytes in [RECORD_BYTES, RECORD_BYTES + 128, RECORD_BYTES + 1024] {
        for record in bytes.chunks(record_bytes) {
            let _refused = decode_record(record, place);
            let Some(parsed) = parse_record(record) else { continue };
            let meta_bytes = usize::from(parsed.meta_bytes);
            let Some(meta) = record.get(RECORD_BYTES..RECORD_BYTES + meta_bytes) else { continue };
            let mut written = vec![0; record.len()];
            encode_record(&mut written, &parsed, meta, place);
            match decode_record(&written, place) {
                Ok(read) => {
                    #[cfg(planted)]
                    assert!(parsed.tenant != 0x4B4B, "planted");
                    assert_eq!(read, Some(parsed));
                    assert_eq!(&written[RECORD_BYTES..RECORD_BYTES + meta_bytes], meta);
                }
                Err(_) => assert!(parsed.generation > 1 << 62),
            }
            let elsewhere = RecordLocation { slot: place.slot.wrapping_add(1), ..place };
            assert!(decode_record(&written, elsewhere).is_err());
        }
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _refused = decode_page(data);
    let _refused = decode_segment_header(data);
    let page = page_of(data);
    let _refused = decode_page(&page);
    let page = sealed(page);
    if let Ok((header, segment)) = decode_segment_header(&page) {
        let mut written = [0xFF; PAGE_BYTES];
        encode_segment_header(&mut written, &header, &segment);
        assert_eq!(decode_segment_header(&written), Ok((header, segment)));
    }
    let place = RecordLocation { store_id: 1, segment: data.len() as u32, slot: 3 };
    records(data, place);
    records(&page[RECORDS_AT..], place);
});
