//! The tables of the file.

use redb::{ReadableTable, TableDefinition};

use crate::{Collection, Error, Key};

/// By tenant, collection and id: the end of the document's time in Unix seconds, and the document.
pub(crate) const DOCUMENTS: TableDefinition<'_, (&str, u8, &str), (u64, &[u8])> =
    TableDefinition::new("documents");
/// The same keys by the end of their time.
pub(crate) const EXPIRIES: TableDefinition<'_, (u64, &str, u8, &str), ()> = TableDefinition::new("expiries");
/// Bytes of each tenant's documents.
pub(crate) const SIZES: TableDefinition<'_, &str, u64> = TableDefinition::new("sizes");

pub(crate) fn place(key: &Key) -> (&str, u8, &str) {
    (&key.tenant, key.collection as u8, &key.id)
}

/// Makes the tables of a new file; the bytes of all documents.
pub(crate) fn prepare(file: &redb::Database) -> Result<u64, Error> {
    let write = file.begin_write().map_err(Error::storage)?;
    let bytes = {
        write.open_table(DOCUMENTS).map_err(Error::storage)?;
        write.open_table(EXPIRIES).map_err(Error::storage)?;
        let sizes = write.open_table(SIZES).map_err(Error::storage)?;
        let mut bytes = 0_u64;
        for entry in sizes.iter().map_err(Error::storage)? {
            bytes = bytes.saturating_add(entry.map_err(Error::storage)?.1.value());
        }
        bytes
    };
    write.commit().map_err(Error::storage)?;
    Ok(bytes)
}

/// Goes through a tenant's documents whose id begins with `prefix`, in the order of their ids, from the first after `after`,
/// until `each` has enough.
pub(crate) fn walk(
    documents: &impl ReadableTable<(&'static str, u8, &'static str), (u64, &'static [u8])>,
    (tenant, collection): (&str, Collection),
    prefix: &str,
    after: Option<&str>,
    mut each: impl FnMut(&str, u64, &[u8]) -> bool,
) -> Result<(), Error> {
    let collection = collection as u8;
    let start = after.filter(|after| *after >= prefix).unwrap_or(prefix);
    let found = documents.range((tenant, collection, start)..).map_err(Error::storage)?;
    for entry in found {
        let (key, value) = entry.map_err(Error::storage)?;
        let (of, kind, id) = key.value();
        if of != tenant || kind != collection || !id.starts_with(prefix) {
            break;
        }
        if after == Some(id) {
            continue;
        }
        let (expires, document) = value.value();
        if !each(id, expires, document) {
            break;
        }
    }
    Ok(())
}
