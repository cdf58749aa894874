//! Table of the supported commands: one line for each.
//!
//! The table says how many arguments a command has, which of them are keys, and whether it changes them; `COMMAND`
//! answers from it, arity is checked by it, and the order of commands on one connection is kept by it.

use crate::reply::Reply;
use crate::values::Value;

/// A command, apart from aliases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Get,
    Set,
    SetEx,
    PSetEx,
    SetNx,
    MGet,
    MSet,
    Exists,
    Delete,
    StrLen,
    GetRange,
    Ttl,
    PTtl,
    Expire,
    PExpire,
    Persist,
    Type,
    Memory,
    DbSize,
    Keys,
    Scan,
    Flush,
    Ping,
    Echo,
    Hello,
    Auth,
    Select,
    Client,
    Quit,
    Reset,
    Command,
    Config,
    Info,
}

/// The arguments of a command that are keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyArguments {
    /// The command concerns the connection or the server.
    Connection,
    /// The command concerns all keys.
    Everything,
    /// One argument.
    At(usize),
    /// All arguments.
    All,
    /// Every other argument.
    Pairs,
}

/// One line of the table.
#[derive(Debug)]
pub(crate) struct Specification {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// Number of arguments including the name; a negative arity is a minimum.
    pub(crate) arity: i64,
    pub(crate) keys: KeyArguments,
    pub(crate) writes: bool,
}

const fn reads(name: &'static str, kind: Kind, arity: i64, keys: KeyArguments) -> Specification {
    Specification { name, kind, arity, keys, writes: false }
}

const fn writes(name: &'static str, kind: Kind, arity: i64, keys: KeyArguments) -> Specification {
    Specification { name, kind, arity, keys, writes: true }
}

/// All commands, the frequent ones first because the table is searched in this order.
pub(crate) static COMMANDS: &[Specification] = &[
    reads("get", Kind::Get, 2, KeyArguments::At(1)),
    writes("set", Kind::Set, -3, KeyArguments::At(1)),
    reads("exists", Kind::Exists, -2, KeyArguments::All),
    reads("mget", Kind::MGet, -2, KeyArguments::All),
    writes("mset", Kind::MSet, -3, KeyArguments::Pairs),
    writes("del", Kind::Delete, -2, KeyArguments::All),
    writes("unlink", Kind::Delete, -2, KeyArguments::All),
    writes("setex", Kind::SetEx, 4, KeyArguments::At(1)),
    writes("psetex", Kind::PSetEx, 4, KeyArguments::At(1)),
    writes("setnx", Kind::SetNx, 3, KeyArguments::At(1)),
    reads("strlen", Kind::StrLen, 2, KeyArguments::At(1)),
    reads("getrange", Kind::GetRange, 4, KeyArguments::At(1)),
    reads("substr", Kind::GetRange, 4, KeyArguments::At(1)),
    reads("touch", Kind::Exists, -2, KeyArguments::All),
    reads("ttl", Kind::Ttl, 2, KeyArguments::At(1)),
    reads("pttl", Kind::PTtl, 2, KeyArguments::At(1)),
    writes("expire", Kind::Expire, 3, KeyArguments::At(1)),
    writes("pexpire", Kind::PExpire, 3, KeyArguments::At(1)),
    writes("persist", Kind::Persist, 2, KeyArguments::At(1)),
    reads("type", Kind::Type, 2, KeyArguments::At(1)),
    reads("memory", Kind::Memory, -2, KeyArguments::At(2)),
    reads("dbsize", Kind::DbSize, 1, KeyArguments::Everything),
    reads("keys", Kind::Keys, 2, KeyArguments::Everything),
    reads("scan", Kind::Scan, -2, KeyArguments::Everything),
    writes("flushdb", Kind::Flush, -1, KeyArguments::Everything),
    writes("flushall", Kind::Flush, -1, KeyArguments::Everything),
    reads("ping", Kind::Ping, -1, KeyArguments::Connection),
    reads("echo", Kind::Echo, 2, KeyArguments::Connection),
    reads("hello", Kind::Hello, -1, KeyArguments::Connection),
    reads("auth", Kind::Auth, -2, KeyArguments::Connection),
    reads("select", Kind::Select, 2, KeyArguments::Connection),
    reads("client", Kind::Client, -2, KeyArguments::Connection),
    reads("quit", Kind::Quit, -1, KeyArguments::Connection),
    reads("reset", Kind::Reset, 1, KeyArguments::Connection),
    reads("command", Kind::Command, -1, KeyArguments::Connection),
    reads("config", Kind::Config, -2, KeyArguments::Connection),
    reads("info", Kind::Info, -1, KeyArguments::Connection),
];

/// Maximum length of a command's new name, in bytes.
const NAME_MAX: usize = 64;

/// Names of the commands: those of the table, except for renamed commands.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// Renamed commands and their new names; an empty name turns the command off.
    renamed: Vec<(&'static Specification, Box<str>)>,
}

impl Names {
    /// `renamed` lists pairs of a command's name in the table and its new name; an empty new name turns the
    /// command off. The error names a pair that is not possible.
    pub(crate) fn new(renamed: &[(String, String)]) -> Result<Self, String> {
        let mut names = Self::default();
        for (from, to) in renamed {
            let Some(specification) = Specification::of(from.as_bytes()) else {
                return Err(format!("there is no command '{from}' to rename"));
            };
            let is_taken = |to: &str| {
                Specification::of(to.as_bytes()).is_some()
                    || names.renamed.iter().any(|(_, name)| name.eq_ignore_ascii_case(to))
            };
            if names.is_renamed(specification) {
                return Err(format!("'{from}' is renamed twice"));
            }
            if to.len() > NAME_MAX || !to.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(format!(
                    "the new name of '{from}' is not of at most {NAME_MAX} printable characters"
                ));
            }
            if !to.is_empty() && is_taken(to) {
                return Err(format!("the new name of '{from}' is another command's"));
            }
            names.renamed.push((specification, to.as_str().into()));
        }
        Ok(names)
    }

    fn is_renamed(&self, specification: &Specification) -> bool {
        self.renamed.iter().any(|(renamed, _)| std::ptr::eq(*renamed, specification))
    }

    /// Returns the command of a name, in upper or lower case.
    pub(crate) fn find(&self, name: &[u8]) -> Option<&'static Specification> {
        if let Some(found) = Specification::of(name) {
            return (!self.is_renamed(found)).then_some(found);
        }
        let mut renamed = self.renamed.iter();
        let found = renamed.find(|(_, to)| !to.is_empty() && to.as_bytes().eq_ignore_ascii_case(name));
        found.map(|(specification, _)| *specification)
    }

    /// Commands that have kept their own names. New names are not disclosed to clients.
    pub(crate) fn listed(&self) -> impl Iterator<Item = &'static Specification> {
        COMMANDS.iter().filter(|specification| !self.is_renamed(specification))
    }
}

impl Specification {
    /// Returns the line of a name, in upper or lower case.
    pub(crate) fn of(name: &[u8]) -> Option<&'static Self> {
        COMMANDS.iter().find(|line| line.name.as_bytes().eq_ignore_ascii_case(name))
    }

    /// Whether the number of arguments matches the command's arity.
    pub(crate) fn takes(&self, arguments: &[Value]) -> bool {
        let count = i64::try_from(arguments.len()).unwrap_or(i64::MAX);
        let right = if self.arity < 0 { count >= -self.arity } else { count == self.arity };
        right && (self.keys != KeyArguments::Pairs || arguments.len() % 2 == 1)
    }

    /// The arguments that are keys.
    pub(crate) fn keys<'a>(&self, arguments: &'a [Value]) -> impl Iterator<Item = &'a Value> + use<'a> {
        let (from, to, step) = match self.keys {
            KeyArguments::Connection | KeyArguments::Everything => (0, 0, 1),
            KeyArguments::At(at) => (at, at + 1, 1),
            KeyArguments::All => (1, usize::MAX, 1),
            KeyArguments::Pairs => (1, usize::MAX, 2),
        };
        let to = to.min(arguments.len());
        arguments[from.min(to)..to].iter().step_by(step)
    }

    /// The line as `COMMAND` tells it: name, arity, flags, first key, last key, step.
    pub(crate) fn describe(&self) -> Reply {
        let (first, last, step) = match self.keys {
            KeyArguments::Connection | KeyArguments::Everything => (0, 0, 0),
            KeyArguments::At(at) => (at, at, 1),
            KeyArguments::All => (1, usize::MAX, 1),
            KeyArguments::Pairs => (1, usize::MAX, 2),
        };
        let last = if last == usize::MAX { Reply::Integer(-1) } else { Reply::count(last) };
        let flag = if self.writes { Reply::Simple("write") } else { Reply::Simple("readonly") };
        Reply::Array(vec![
            Reply::text(self.name),
            Reply::Integer(self.arity),
            Reply::Array(vec![flag]),
            Reply::count(first),
            last,
            Reply::Integer(step),
        ])
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn names_arity_and_keys() {
        let arguments = |line: &'static str| -> Vec<Value> {
            line.split(' ').map(|word| Value::from(Bytes::from(word))).collect()
        };
        let keys = |line| {
            let arguments = arguments(line);
            let found = Specification::of(arguments[0].contiguous().expect("short")).expect("known");
            let keys: Vec<_> =
                found.keys(&arguments).map(|key| key.contiguous().expect("short").to_vec()).collect();
            (found.takes(&arguments), keys.join(&b' '))
        };
        assert_eq!(keys("GeT k"), (true, b"k".to_vec()));
        assert_eq!(keys("get"), (false, b"".to_vec()));
        assert_eq!(keys("mset a 1 b 2"), (true, b"a b".to_vec()));
        assert_eq!(keys("mset a 1 b"), (false, b"a b".to_vec()));
        assert_eq!(keys("DEL a b c"), (true, b"a b c".to_vec()));
        assert_eq!(keys("memory usage a"), (true, b"a".to_vec()));
        assert_eq!(keys("memory doctor"), (true, b"".to_vec()));
        assert!(Specification::of(b"multi").is_none());
    }

    #[test]
    fn commands_are_renamed_and_turned_off() {
        let of = |renamed: &[(&str, &str)]| {
            let renamed: Vec<_> =
                renamed.iter().map(|(from, to)| ((*from).to_owned(), (*to).to_owned())).collect();
            Names::new(&renamed)
        };
        let names = of(&[("FLUSHALL", ""), ("flushdb", "x-flush")]).expect("they can be");
        let kind = |name: &[u8]| names.find(name).map(|found| found.kind);
        assert_eq!((kind(b"flushall"), kind(b"FLUSHDB"), kind(b"")), (None, None, None));
        assert_eq!((kind(b"X-Flush"), kind(b"get")), (Some(Kind::Flush), Some(Kind::Get)));
        assert_eq!(names.listed().count(), COMMANDS.len() - 2);
        for bad in [
            &[("NOTHING", "")][..],
            &[("FLUSHALL", "get")],
            &[("FLUSHALL", "two words")],
            &[("FLUSHALL", "a"), ("flushall", "b")],
            &[("FLUSHALL", "a"), ("FLUSHDB", "A")],
        ] {
            assert!(of(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn no_name_is_twice_in_the_table() {
        for (at, line) in COMMANDS.iter().enumerate() {
            assert!(COMMANDS[..at].iter().all(|other| other.name != line.name), "{}", line.name);
        }
    }
}
