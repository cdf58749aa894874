//! Commands that concern stored values.
//!
//! Each command is one future without a connection, so that many of one connection can run side by side.

use std::time::Duration;

use futures_util::future::join_all;

use crate::admission::{Admission, Size};
use crate::commands::{Kind, Specification};
use crate::metrics::RespCounters;
use crate::options::{SYNTAX, integer, key, life, milliseconds, range, set_options, word};
use crate::pattern;
use crate::reply::Reply;
use crate::server::Shared;
use crate::values::{Condition, Entry, Expiry, SetOptions, SetOutcome, Value, Values};
use crate::wire::Command;

/// Maximum number of reads that one command has in flight.
const READS_AT_ONCE: usize = 16;
/// Number of keys that are requested from the store at a time.
const KEYS_AT_ONCE: usize = 1000;

/// Admission of a command's reads, and its reservation.
struct Reads<'a> {
    admission: &'a Admission,
    taken: Size,
}

impl Reads<'_> {
    /// Waits until a value may be read.
    async fn admit<V: Values>(&mut self, shared: &Shared<V>, name: &[u8]) -> Result<(), Reply> {
        let size = self.admission.size(&shared.values, &[name]).await?;
        self.taken = self.admission.reserve(size).await;
        Ok(())
    }
}

/// Carries out a command, whose number of arguments has been checked. Also returns its reservation in
/// `admission`.
pub(crate) async fn execute<V: Values>(
    shared: &Shared<V>,
    specification: &'static Specification,
    mut command: Command,
    admission: &Admission,
) -> (Reply, Size) {
    let arguments = &mut command.arguments;
    let reads = &mut Reads { admission, taken: Size::default() };
    let done = match specification.kind {
        Kind::Get => get(shared, arguments, reads).await,
        Kind::Set => set(shared, arguments, reads).await,
        Kind::SetEx => set_for(shared, arguments, 1000, specification.name).await,
        Kind::PSetEx => set_for(shared, arguments, 1, specification.name).await,
        Kind::SetNx => set_if_absent(shared, arguments).await,
        Kind::MGet => get_many(shared, arguments, reads).await,
        Kind::MSet => set_many(shared, arguments).await,
        Kind::Exists => exists(shared, arguments).await,
        Kind::Delete => delete(shared, arguments).await,
        Kind::StrLen => {
            look(shared, &arguments[1]).await.map(|entry| length(entry.map_or(0, |entry| entry.bytes)))
        }
        Kind::GetRange => get_range(shared, arguments, reads).await,
        Kind::Ttl => look(shared, &arguments[1]).await.map(|entry| remaining(entry, 1000)),
        Kind::PTtl => look(shared, &arguments[1]).await.map(|entry| remaining(entry, 1)),
        Kind::Expire => expire(shared, arguments, 1000, specification.name).await,
        Kind::PExpire => expire(shared, arguments, 1, specification.name).await,
        Kind::Persist => persist(shared, arguments).await,
        Kind::Type => {
            let name = |entry: Option<Entry>| Reply::Simple(if entry.is_some() { "string" } else { "none" });
            look(shared, &arguments[1]).await.map(name)
        }
        Kind::Memory => memory(shared, arguments).await,
        Kind::DbSize => Ok(length(shared.values.usage().keys)),
        Kind::Keys => keys(shared, arguments).await,
        Kind::Scan => scan(shared, arguments).await,
        Kind::Flush => flush(shared, arguments, specification.name).await,
        other => Err(Reply::error(format!("ERR {other:?} does not concern stored values"))),
    };
    (done.unwrap_or_else(|refusal| refusal), reads.taken)
}

/// The answer, or the error to answer with.
type Answer = Result<Reply, Reply>;

fn length(bytes: u64) -> Reply {
    Reply::Integer(i64::try_from(bytes).unwrap_or(i64::MAX))
}

/// Counts a read as hit or miss, and returns its value.
fn found<V: Values>(shared: &Shared<V>, value: Option<Value>) -> Option<Value> {
    let counters = &shared.counters;
    RespCounters::add(if value.is_some() { &counters.hits } else { &counters.misses }, 1);
    value
}

async fn get<V: Values>(shared: &Shared<V>, arguments: &[Value], reads: &mut Reads<'_>) -> Answer {
    let name = key(&arguments[1])?;
    reads.admit(shared, name).await?;
    let value = shared.values.get(name).await?;
    Ok(found(shared, value).map_or(Reply::Null, Reply::Bulk))
}

async fn get_range<V: Values>(shared: &Shared<V>, arguments: &[Value], reads: &mut Reads<'_>) -> Answer {
    let (start, end) = (integer(&arguments[2])?, integer(&arguments[3])?);
    let name = key(&arguments[1])?;
    reads.admit(shared, name).await?;
    let value = shared.values.get(name).await?;
    let value = found(shared, value).unwrap_or_default();
    Ok(Reply::Bulk(value.slice(range(start, end, value.len()))))
}

async fn get_many<V: Values>(shared: &Shared<V>, arguments: &[Value], reads: &mut Reads<'_>) -> Answer {
    let bytes_max = shared.config.buffered_bytes_max;
    let refuse = || Reply::error(format!("ERR the values exceed {bytes_max} bytes: ask for fewer"));
    let names = arguments[1..].iter().map(key).collect::<Result<Vec<_>, _>>()?;
    let size = reads.admission.size(&shared.values, &names).await?;
    if size.bytes > bytes_max && names.len() > 1 {
        return Err(refuse());
    }
    reads.taken = reads.admission.reserve(size).await;
    let (mut replies, mut bytes) = (Vec::new(), 0);
    for some in names.chunks(READS_AT_ONCE) {
        for value in join_all(some.iter().map(|name| shared.values.get(name))).await {
            let value = found(shared, value?);
            bytes += value.as_ref().map_or(0, Value::len);
            // A size may have been unknown, or have changed since.
            if bytes > bytes_max && names.len() > 1 {
                return Err(refuse());
            }
            replies.push(value.map_or(Reply::Null, Reply::Bulk));
        }
    }
    Ok(Reply::Array(replies))
}

/// Stores a value, and turns the outcome into an answer.
async fn put<V: Values>(
    shared: &Shared<V>,
    name: &[u8],
    value: Value,
    options: SetOptions,
) -> Result<bool, Reply> {
    let bytes = value.len();
    match shared.values.set(name, value, options).await? {
        SetOutcome::Stored => Ok(true),
        SetOutcome::ConditionUnmet => Ok(false),
        SetOutcome::Throttled => {
            RespCounters::add(&shared.counters.throttled, 1);
            Err(Reply::error("TRYAGAIN the store takes no more at the moment"))
        }
        SetOutcome::TooLarge { bytes_max } => {
            Err(Reply::error(format!("ERR a value of {bytes} bytes is above the store's {bytes_max}")))
        }
    }
}

async fn set<V: Values>(shared: &Shared<V>, arguments: &mut [Value], reads: &mut Reads<'_>) -> Answer {
    let (options, previous) = set_options(&arguments[3..])?;
    let value = std::mem::take(&mut arguments[2]);
    let name = key(&arguments[1])?;
    let before = match previous {
        true => {
            reads.admit(shared, name).await?;
            Some(shared.values.get(name).await?.map_or(Reply::Null, Reply::Bulk))
        }
        false => None,
    };
    let stored = put(shared, name, value, options).await?;
    Ok(before.unwrap_or(if stored { Reply::OK } else { Reply::Null }))
}

async fn set_for<V: Values>(
    shared: &Shared<V>,
    arguments: &mut [Value],
    unit_ms: i64,
    command: &str,
) -> Answer {
    let expiry = Expiry::After(life(&arguments[2], unit_ms, command)?);
    let value = std::mem::take(&mut arguments[3]);
    put(shared, key(&arguments[1])?, value, SetOptions { expiry, ..SetOptions::default() }).await?;
    Ok(Reply::OK)
}

async fn set_if_absent<V: Values>(shared: &Shared<V>, arguments: &mut [Value]) -> Answer {
    let value = std::mem::take(&mut arguments[2]);
    let options = SetOptions { condition: Condition::IfAbsent, ..SetOptions::default() };
    put(shared, key(&arguments[1])?, value, options).await.map(|stored| Reply::Integer(i64::from(stored)))
}

/// Sets one after the other, so that the last value of a repeated key remains.
async fn set_many<V: Values>(shared: &Shared<V>, arguments: &mut [Value]) -> Answer {
    for pair in arguments[1..].chunks_exact_mut(2) {
        let value = std::mem::take(&mut pair[1]);
        put(shared, key(&pair[0])?, value, SetOptions::default()).await?;
    }
    Ok(Reply::OK)
}

async fn look<V: Values>(shared: &Shared<V>, argument: &Value) -> Result<Option<Entry>, Reply> {
    Ok(shared.values.look(key(argument)?).await?)
}

async fn exists<V: Values>(shared: &Shared<V>, arguments: &[Value]) -> Answer {
    let mut there = 0;
    for some in arguments[1..].chunks(READS_AT_ONCE) {
        let mut looks = Vec::with_capacity(some.len());
        for argument in some {
            looks.push(shared.values.look(key(argument)?));
        }
        for entry in join_all(looks).await {
            there += usize::from(entry?.is_some());
        }
    }
    Ok(Reply::count(there))
}

async fn delete<V: Values>(shared: &Shared<V>, arguments: &[Value]) -> Answer {
    let mut there = 0;
    for argument in &arguments[1..] {
        there += usize::from(shared.values.delete(key(argument)?).await?);
    }
    Ok(Reply::count(there))
}

/// Remaining lifetime rounded to a unit; -1: no expiry, -2: no such key.
fn remaining(entry: Option<Entry>, unit_ms: u128) -> Reply {
    match entry {
        None => Reply::Integer(-2),
        Some(Entry { expires_in: None, .. }) => Reply::Integer(-1),
        Some(Entry { expires_in: Some(time), .. }) => {
            Reply::Integer(i64::try_from((time.as_millis() + unit_ms / 2) / unit_ms).unwrap_or(i64::MAX))
        }
    }
}

/// A time that has passed deletes the key at once.
async fn expire<V: Values>(shared: &Shared<V>, arguments: &[Value], unit_ms: i64, command: &str) -> Answer {
    let time_ms = milliseconds(&arguments[2], unit_ms, command)?;
    let name = key(&arguments[1])?;
    let there = match u64::try_from(time_ms) {
        Ok(time_ms) if time_ms > 0 => {
            shared.values.expire(name, Some(Duration::from_millis(time_ms))).await?
        }
        _ => shared.values.delete(name).await?,
    };
    Ok(Reply::Integer(i64::from(there)))
}

async fn persist<V: Values>(shared: &Shared<V>, arguments: &[Value]) -> Answer {
    let name = key(&arguments[1])?;
    let mortal = shared.values.look(name).await?.is_some_and(|entry| entry.expires_in.is_some());
    let changed = mortal && shared.values.expire(name, None).await?;
    Ok(Reply::Integer(i64::from(changed)))
}

async fn memory<V: Values>(shared: &Shared<V>, arguments: &[Value]) -> Answer {
    if word(&arguments[1]) != "USAGE" || arguments.len() < 3 {
        return Err(Reply::error("ERR only MEMORY USAGE key is known"));
    }
    let entry = look(shared, &arguments[2]).await?;
    Ok(entry.map_or(Reply::Null, |entry| length(entry.bytes.saturating_add(arguments[2].len() as u64))))
}

async fn keys<V: Values>(shared: &Shared<V>, arguments: &[Value]) -> Answer {
    let wanted = key(&arguments[1])?;
    let (mut replies, mut cursor) = (Vec::new(), 0);
    loop {
        let page = shared.values.keys(cursor, KEYS_AT_ONCE).await?;
        let fitting = page.keys.into_iter().filter(|name| pattern::fits(wanted, name));
        replies.extend(fitting.map(Reply::text));
        if replies.len() > shared.config.keys_reply_max {
            let most = shared.config.keys_reply_max;
            return Err(Reply::error(format!("ERR more than {most} keys: use SCAN")));
        }
        cursor = page.next;
        if cursor == 0 {
            return Ok(Reply::Array(replies));
        }
        // A long walk must not keep other connections waiting.
        tokio::task::yield_now().await;
    }
}

async fn scan<V: Values>(shared: &Shared<V>, arguments: &[Value]) -> Answer {
    let cursor = arguments[1].contiguous().and_then(|digits| std::str::from_utf8(digits).ok());
    let cursor: u64 =
        cursor.and_then(|digits| digits.parse().ok()).ok_or_else(|| Reply::error("ERR invalid cursor"))?;
    let (mut limit, mut wanted, mut strings) = (10, &b"*"[..], true);
    for option in arguments[2..].chunks(2) {
        let [name, argument] = option else { return Err(SYNTAX) };
        match word(name).as_str() {
            "COUNT" => {
                let count = integer(argument)?;
                limit =
                    usize::try_from(count).ok().filter(|count| *count > 0).ok_or(SYNTAX)?.min(KEYS_AT_ONCE);
            }
            "MATCH" => wanted = key(argument)?,
            "TYPE" => strings = word(argument) == "STRING",
            _ => return Err(SYNTAX),
        }
    }
    let page = shared.values.keys(cursor, limit).await?;
    let fitting = page.keys.into_iter().filter(|name| strings && pattern::fits(wanted, name));
    let names = Reply::Array(fitting.map(Reply::text).collect());
    Ok(Reply::Array(vec![Reply::text(page.next.to_string()), names]))
}

async fn flush<V: Values>(shared: &Shared<V>, arguments: &[Value], command: &str) -> Answer {
    if !shared.config.allow_flush {
        return Err(Reply::error(format!("ERR '{command}' is not allowed by this server's configuration")));
    }
    match arguments {
        [_] => {}
        [_, how] if matches!(word(how).as_str(), "ASYNC" | "SYNC") => {}
        _ => return Err(SYNTAX),
    }
    shared.values.clear().await?;
    Ok(Reply::OK)
}
