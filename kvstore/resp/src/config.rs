//! Settings and bounds of the server.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use subtle::ConstantTimeEq;

use crate::commands::Names;
use crate::error::RespError;
use crate::wire::Limits;

/// An address that the server listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// A TCP address; port 0 lets the system choose.
    Tcp(SocketAddr),
    /// A unix socket, made with mode 0600.
    Unix(PathBuf),
}

/// A password, which `Debug` does not show.
#[derive(Clone)]
pub struct Password(Box<[u8]>);

impl Password {
    /// Wraps a password.
    #[must_use]
    pub fn new(password: impl AsRef<[u8]>) -> Self {
        Self(password.as_ref().into())
    }

    /// Compares in time that depends on the lengths only.
    #[must_use]
    pub fn is(&self, other: &[u8]) -> bool {
        self.0.ct_eq(other).into()
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Password(…)")
    }
}

/// Settings of the server. [`RespConfig::default`] has the defaults of all but `listen`.
#[derive(Debug, Clone)]
pub struct RespConfig {
    /// Addresses to listen on; at least one.
    pub listen: Vec<Listen>,
    /// Whether TCP addresses other than loopback are allowed. The protocol is not encrypted.
    pub allow_remote: bool,
    /// Password that clients must give in `AUTH` or `HELLO`; `None` admits every client that reaches the
    /// socket.
    pub password: Option<Password>,
    /// Maximum number of connections; a further one gets an error and is closed. 1 to 65,536.
    pub clients_max: usize,
    /// Maximum length of an argument, and so of a value. 1 KiB to 512 MiB.
    pub value_bytes_max: usize,
    /// Maximum bytes of all arguments of one command. At least `value_bytes_max`.
    pub command_bytes_max: usize,
    /// Maximum number of arguments of a command, its name included. 16 to 1,048,576.
    pub arguments_max: usize,
    /// Maximum number of commands of one connection that are carried out concurrently. 1 to 1,024.
    pub pipeline_max: usize,
    /// Bytes of arguments being carried out, values being read and answers not yet sent, for one connection:
    /// above this no further command or read is started until the client reads. A single command may exceed it,
    /// and so may four reads of a store that has no [`Values::size_hint`](crate::Values::size_hint). Also the
    /// maximum bytes that `MGET` answers.
    pub buffered_bytes_max: usize,
    /// Maximum bytes of large arguments (above 32 KiB), and of small ones beyond 64 KiB of a command, that all
    /// connections together have received and not yet carried out. Above it one command at a time continues, so
    /// that up to `command_bytes_max` come on top; the others wait their turn, and a command that waits for 3 s
    /// is answered with `TRYAGAIN`. At least `command_bytes_max`.
    pub received_bytes_max: usize,
    /// Maximum number of keys that `KEYS` answers.
    pub keys_reply_max: usize,
    /// Time without a request after which a connection is closed; zero: never. LMCache's native client does not
    /// reconnect, so the default is never.
    pub idle_timeout: Duration,
    /// Time after which a connection is closed that stops in the middle of a command or does not take its
    /// answers, or that moves less than 64 KiB/s while it has a share of `received_bytes_max`.
    pub stall_timeout: Duration,
    /// Maximum time that connections may take to finish their commands when the server stops.
    pub drain: Duration,
    /// Whether `FLUSHDB` and `FLUSHALL` are allowed.
    pub allow_flush: bool,
    /// Renamed commands: the command's own name and the new one, of at most 64 printable characters. An empty
    /// new name turns the command off.
    pub renamed: Vec<(String, String)>,
}

impl Default for RespConfig {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            allow_remote: false,
            password: None,
            clients_max: 4096,
            value_bytes_max: 64 << 20,
            command_bytes_max: 128 << 20,
            arguments_max: 65_536,
            pipeline_max: 32,
            buffered_bytes_max: 64 << 20,
            received_bytes_max: 1 << 30,
            keys_reply_max: 100_000,
            idle_timeout: Duration::ZERO,
            stall_timeout: Duration::from_secs(60),
            drain: Duration::from_secs(5),
            allow_flush: false,
            renamed: Vec::new(),
        }
    }
}

impl RespConfig {
    /// Checks the ranges of the settings, and reports all problems at once.
    ///
    /// # Errors
    /// [`RespError::Configuration`] with one line for each problem.
    pub fn check(&self) -> Result<(), RespError> {
        let ranges = [
            ("clients_max", self.clients_max, 1, 65_536),
            ("value_bytes_max", self.value_bytes_max, 1 << 10, 512 << 20),
            ("command_bytes_max", self.command_bytes_max, self.value_bytes_max, 1 << 40),
            ("arguments_max", self.arguments_max, 16, 1 << 20),
            ("pipeline_max", self.pipeline_max, 1, 1024),
            ("buffered_bytes_max", self.buffered_bytes_max, 1 << 10, 1 << 40),
            ("received_bytes_max", self.received_bytes_max, self.command_bytes_max, 1 << 41),
            ("keys_reply_max", self.keys_reply_max, 1, 10_000_000),
        ];
        let mut problems: Vec<String> = ranges
            .iter()
            .filter(|(_, value, least, most)| !(least..=most).contains(&value))
            .map(|(name, value, least, most)| format!("{name} = {value} is not in {least} to {most}"))
            .collect();
        if self.listen.is_empty() {
            problems.push("no place to listen".to_owned());
        }
        if self.stall_timeout.is_zero() {
            problems.push("stall_timeout = 0 would close every connection".to_owned());
        }
        for place in &self.listen {
            if let Listen::Tcp(address) = place
                && !address.ip().is_loopback()
                && !self.allow_remote
            {
                problems.push(format!("{address} is not a loopback address and allow_remote is false"));
            }
        }
        problems.extend(Names::new(&self.renamed).err());
        if problems.is_empty() { Ok(()) } else { Err(RespError::Configuration(problems.join("; "))) }
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            value_bytes_max: self.value_bytes_max,
            command_bytes_max: self.command_bytes_max,
            arguments_max: self.arguments_max,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn all_problems_are_told_at_once() {
        let mut config = RespConfig::default();
        config.listen.push(Listen::Tcp((Ipv4Addr::LOCALHOST, 0).into()));
        config.check().expect("the defaults are in range");
        config.listen.push(Listen::Tcp((Ipv4Addr::UNSPECIFIED, 0).into()));
        config.pipeline_max = 0;
        config.renamed = vec![("NOTHING".to_owned(), String::new())];
        let told = config.check().expect_err("three problems").to_string();
        assert!(told.contains("pipeline_max") && told.contains("loopback"), "{told}");
        assert!(told.contains("NOTHING"), "{told}");
    }

    #[test]
    fn passwords_are_compared_and_not_shown() {
        let password = Password::new("secret");
        assert!(password.is(b"secret") && !password.is(b"secreT") && !password.is(b"secret2"));
        assert!(!format!("{password:?}").contains("secret"));
    }
}
