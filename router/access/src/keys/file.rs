//! The keys file: parses TOML to a [`KeySet`] or to a list of all problems. It has `[[key]]`,
//! `[[certificate]]` and `[[tenant]]`.
//!
//! The document is walked by hand rather than through serde, which stops at the first problem. Messages
//! name the line and the field, never a value: a key may have been pasted in place of its digest.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use jiff::Timestamp;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{Digest, KEYS_FILE_BYTES_MAX, KEYS_MAX, KeySet};
use crate::error::{Problem, Problems};
use crate::grant::{Grant, LimitConfig, Models, PER_MINUTE_MAX, WEIGHT_MAX, is_name};
use crate::limits::Scope;

/// Largest number of problems that are listed.
const PROBLEMS_MAX: usize = 100;
const KEY_FIELDS: [&str; 11] = [
    "name",
    "tenant",
    "sha256",
    "admin",
    "models",
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_max",
    "priority",
    "weight",
    "expires",
];
const CERTIFICATE_FIELDS: [&str; 11] = [
    "name",
    "tenant",
    "identity",
    "admin",
    "models",
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_max",
    "priority",
    "weight",
    "expires",
];
const TENANT_FIELDS: [&str; 4] = ["name", "requests_per_minute", "tokens_per_minute", "concurrent_max"];

pub(super) fn parse(text: &str) -> Result<KeySet, Problems> {
    if text.len() > KEYS_FILE_BYTES_MAX {
        let message = format!("the file is larger than {KEYS_FILE_BYTES_MAX} bytes");
        return Err(Problems(vec![Problem { line: 1, message }]));
    }
    let mut reader = Reader { lines: line_starts(text), problems: Vec::new() };
    let (document, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        reader.problem(error.span().unwrap_or(0..0), error.message().to_owned());
    }
    let keys = reader.document(document.get_ref());
    let mut problems = reader.problems;
    if problems.is_empty() {
        return Ok(keys);
    }
    problems.sort_by_key(|problem| problem.line);
    problems.truncate(PROBLEMS_MAX);
    Err(Problems(problems))
}

fn line_starts(text: &str) -> Vec<usize> {
    std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect()
}

struct Reader {
    /// Byte offset of each line's start.
    lines: Vec<usize>,
    problems: Vec<Problem>,
}

/// Field of a certificate that holds a name.
#[derive(Clone, Copy)]
enum IdentityKind {
    Uri,
    DnsName,
    CommonName,
}

/// A table with its position in the document.
struct Table<'a, 'i> {
    fields: &'a DeTable<'i>,
    span: Range<usize>,
}

impl Reader {
    fn problem(&mut self, span: Range<usize>, message: impl Into<String>) {
        let line = self.lines.partition_point(|&start| start <= span.start);
        self.problems.push(Problem { line, message: message.into() });
    }

    fn document(&mut self, document: &DeTable<'_>) -> KeySet {
        let mut keys = KeySet::default();
        for (name, value) in document.iter() {
            if !["key", "certificate", "tenant"].contains(&name.get_ref().as_ref()) {
                self.problem(name.span(), "only [[key]], [[certificate]] and [[tenant]] may stand here");
            } else if !value.get_ref().is_array() {
                self.problem(name.span(), "write it in double brackets");
            }
        }
        for table in self.tables(document, "tenant") {
            self.tenant(&table, &mut keys.tenants);
        }
        let tables = self.tables(document, "key");
        if tables.len() > KEYS_MAX {
            self.problem(0..0, format!("there are more than {KEYS_MAX} keys"));
        }
        let mut names = HashSet::new();
        for table in tables.iter().take(KEYS_MAX) {
            let tenants = &keys.tenants;
            let Some((digest, grant)) = self.key(table, tenants) else { continue };
            if !names.insert(Arc::clone(&grant.name)) {
                self.problem(table.span.clone(), "another key has this name");
            }
            if keys.grants.insert(digest, Arc::new(grant)).is_some() {
                self.problem(table.span.clone(), "another key has this sha256");
            }
        }
        let tables = self.tables(document, "certificate");
        if tables.len() > KEYS_MAX {
            self.problem(0..0, format!("there are more than {KEYS_MAX} certificates"));
        }
        for table in tables.iter().take(KEYS_MAX) {
            let Some((kind, identity, grant)) = self.certificate(table, &keys.tenants) else { continue };
            if !names.insert(Arc::clone(&grant.name)) {
                self.problem(table.span.clone(), "another key or certificate has this name");
            }
            let known = match kind {
                IdentityKind::Uri => &mut keys.certificates.uris,
                IdentityKind::DnsName => &mut keys.certificates.dns_names,
                IdentityKind::CommonName => &mut keys.certificates.common_names,
            };
            if known.insert(identity, Arc::new(grant)).is_some() {
                self.problem(table.span.clone(), "another certificate has this identity");
            }
        }
        keys
    }

    fn tables<'a, 'i>(&mut self, document: &'a DeTable<'i>, name: &str) -> Vec<Table<'a, 'i>> {
        let Some(array) = document.get(name).and_then(|value| value.get_ref().as_array()) else {
            return Vec::new();
        };
        let mut tables = Vec::with_capacity(array.len().min(KEYS_MAX + 1));
        for value in array.iter().take(KEYS_MAX + 1) {
            match value.get_ref().as_table() {
                Some(fields) => tables.push(Table { fields, span: value.span() }),
                None => self.problem(value.span(), format!("a {name} must be a table")),
            }
        }
        tables
    }

    fn tenant(&mut self, table: &Table<'_, '_>, tenants: &mut HashMap<Box<str>, LimitConfig>) {
        self.known(table, &TENANT_FIELDS);
        let limits = self.limits(table);
        let Some(name) = self.name(table, "name") else { return };
        if tenants.insert(name.into(), limits).is_some() {
            self.problem(table.span.clone(), "this tenant stands here twice");
        }
    }

    fn key(
        &mut self,
        table: &Table<'_, '_>,
        tenants: &HashMap<Box<str>, LimitConfig>,
    ) -> Option<(Digest, Grant)> {
        self.known(table, &KEY_FIELDS);
        let digest = self.digest(table);
        let grant = self.grant(table, tenants);
        Some((digest?, grant?))
    }

    fn certificate(
        &mut self,
        table: &Table<'_, '_>,
        tenants: &HashMap<Box<str>, LimitConfig>,
    ) -> Option<(IdentityKind, Box<str>, Grant)> {
        self.known(table, &CERTIFICATE_FIELDS);
        let identity = self.identity(table);
        let grant = self.grant(table, tenants);
        let (kind, identity) = identity?;
        Some((kind, identity, grant?))
    }

    /// Reads the grant of a key or a certificate.
    fn grant(&mut self, table: &Table<'_, '_>, tenants: &HashMap<Box<str>, LimitConfig>) -> Option<Grant> {
        let name = self.name(table, "name");
        let tenant = self.name(table, "tenant");
        let is_admin = self.flag(table, "admin");
        let models = self.models(table);
        let limits = self.limits(table);
        let priority = self.number(table, "priority", i64::from(i32::MIN)..=i64::from(i32::MAX));
        let weight = self.number(table, "weight", 1..=i64::from(WEIGHT_MAX));
        let expires = self.expires(table);
        let (name, tenant) = (name?, tenant?);
        Some(Grant {
            tenant_limits: tenants.get(tenant).copied().unwrap_or_default(),
            name: name.into(),
            scope: Scope::Key,
            tenant: tenant.into(),
            is_admin,
            models,
            limits,
            priority: priority.and_then(|value| i32::try_from(value).ok()).unwrap_or(0),
            weight: weight.and_then(|value| u32::try_from(value).ok()).unwrap_or(1),
            expires,
        })
    }

    fn known(&mut self, table: &Table<'_, '_>, fields: &[&str]) {
        for (name, _) in table.fields.iter() {
            if !fields.contains(&name.get_ref().as_ref()) {
                self.problem(name.span(), format!("unknown field; there are {}", fields.join(", ")));
            }
        }
    }

    /// Reads a field whose value must have the right type; another type is a problem.
    fn field<'a, 'i, T>(
        &mut self,
        table: &Table<'a, 'i>,
        field: &str,
        wanted: &str,
        read: impl FnOnce(&'a DeValue<'i>) -> Option<T>,
    ) -> Option<(T, Range<usize>)> {
        let value: &'a Spanned<DeValue<'i>> = table.fields.get(field)?;
        let read = read(value.get_ref()).map(|read| (read, value.span()));
        if read.is_none() {
            self.problem(value.span(), format!("{field} must be {wanted}"));
        }
        read
    }

    fn name<'a>(&mut self, table: &Table<'a, '_>, field: &str) -> Option<&'a str> {
        if !table.fields.contains_key(field) {
            self.problem(table.span.clone(), format!("{field} is missing"));
        }
        let wanted = "a text of 1 to 128 bytes without control characters";
        let (name, _) =
            self.field(table, field, wanted, |value| value.as_str().filter(|text| is_name(text)))?;
        Some(name)
    }

    fn digest(&mut self, table: &Table<'_, '_>) -> Option<Digest> {
        if !table.fields.contains_key("sha256") {
            self.problem(table.span.clone(), "sha256 is missing");
        }
        let (digest, _) =
            self.field(table, "sha256", "64 hexadecimal digits", |value| from_hex(value.as_str()?))?;
        Some(digest)
    }

    /// Reads `uri:`, `dns:` or `cn:`, followed by the name as written in the certificate.
    fn identity(&mut self, table: &Table<'_, '_>) -> Option<(IdentityKind, Box<str>)> {
        if !table.fields.contains_key("identity") {
            self.problem(table.span.clone(), "identity is missing");
        }
        let wanted = "`uri:`, `dns:` or `cn:` and a name";
        let (identity, _) = self.field(table, "identity", wanted, |value| {
            let (kind, name) = value.as_str()?.split_once(':')?;
            let kind = match kind {
                "uri" => IdentityKind::Uri,
                "dns" => IdentityKind::DnsName,
                "cn" => IdentityKind::CommonName,
                _ => return None,
            };
            (!name.is_empty()).then(|| (kind, name.into()))
        })?;
        Some(identity)
    }

    fn flag(&mut self, table: &Table<'_, '_>, field: &str) -> bool {
        self.field(table, field, "true or false", DeValue::as_bool).is_some_and(|(flag, _)| flag)
    }

    /// Reads the models. Without the field every model is allowed, as with `["*"]`.
    fn models(&mut self, table: &Table<'_, '_>) -> Models {
        let names = self.field(table, "models", "a list of names", |value| {
            let names =
                value.as_array()?.iter().map(|name| name.get_ref().as_str().filter(|name| is_name(name)));
            names.collect::<Option<Vec<_>>>()
        });
        names.map_or(Models::All, |(names, _)| Models::from_names(names))
    }

    fn limits(&mut self, table: &Table<'_, '_>) -> LimitConfig {
        let most = i64::try_from(PER_MINUTE_MAX).unwrap_or(i64::MAX);
        let requests = self.number(table, "requests_per_minute", 1..=most);
        let tokens = self.number(table, "tokens_per_minute", 1..=most);
        let concurrent = self.number(table, "concurrent_max", 1..=i64::from(u32::MAX));
        LimitConfig {
            requests_per_minute: requests.and_then(|value| u64::try_from(value).ok()),
            tokens_per_minute: tokens.and_then(|value| u64::try_from(value).ok()),
            concurrent_max: concurrent.and_then(|value| u32::try_from(value).ok()),
        }
    }

    fn number(
        &mut self,
        table: &Table<'_, '_>,
        field: &str,
        range: std::ops::RangeInclusive<i64>,
    ) -> Option<i64> {
        let (number, span) = self.field(table, field, "a whole number", |value| {
            let number = value.as_integer()?;
            i64::from_str_radix(number.as_str(), number.radix()).ok()
        })?;
        if !range.contains(&number) {
            self.problem(span, format!("{field} must be between {} and {}", range.start(), range.end()));
        }
        Some(number)
    }

    /// Reads the expiry: `"2027-01-01T00:00:00Z"` or TOML's own date and time, which must have an offset.
    fn expires(&mut self, table: &Table<'_, '_>) -> Option<u64> {
        let wanted = "a time as in RFC 3339, with offset";
        let (expires, _) = self.field(table, "expires", wanted, |value| {
            let text = match value {
                DeValue::String(text) => text.to_string(),
                DeValue::Datetime(time) => time.to_string(),
                _ => return None,
            };
            let time: Timestamp = text.parse().ok()?;
            u64::try_from(time.as_second()).ok()
        })?;
        Some(expires)
    }
}

fn from_hex(text: &str) -> Option<Digest> {
    if text.len() != 64 {
        return None;
    }
    let mut digest = [0; 32];
    for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16);
        *byte = u8::try_from(digit(0)? * 16 + digit(1)?).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests;
