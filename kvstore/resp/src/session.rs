//! State of one connection: version of the protocol, authentication, name.
//!
//! Commands that concern this state are answered here, at once and only when all earlier ones have been
//! answered: `HELLO` changes how answers are written.

use std::borrow::Cow;

use bytes::Bytes;

use crate::commands::{KeyArguments, Kind, Names, Specification};
use crate::options::{SYNTAX, integer, word};
use crate::reply::{Protocol, Reply};
use crate::server::Shared;
use crate::server_info;
use crate::values::{Value, Values};
use crate::wire::{Command, Limits};

/// Limits of a client that has not authenticated: as in Redis, enough for `AUTH` and `HELLO`.
const UNAUTHENTICATED_LIMITS: Limits =
    Limits { value_bytes_max: 16 << 10, command_bytes_max: 64 << 10, arguments_max: 10 };
const NO_AUTH: Reply = Reply::Error(Cow::Borrowed("NOAUTH Authentication required."));
const WRONG_PASSWORD: Reply =
    Reply::Error(Cow::Borrowed("WRONGPASS invalid username-password pair or user is disabled."));
/// Names that begin a line of an HTTP request only. A page in a browser can make it send such a request to any
/// port, with commands in its body (redis-server's `securityWarningCommand`).
const CROSS_PROTOCOL: [&[u8]; 2] = [b"POST", b"HOST:"];
/// Maximum length of a connection's name.
const NAME_MAX: usize = 256;

/// State of one connection.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: u64,
    pub(crate) protocol: Protocol,
    pub(crate) authenticated: bool,
    pub(crate) name: Bytes,
    pub(crate) closing: bool,
}

/// Next step for a command.
#[derive(Debug)]
pub(crate) enum Dispatch {
    /// Send this answer.
    Answer(Reply),
    /// Let the session answer the command.
    Session(&'static Specification, Command),
    /// Carry the command out on stored values.
    Stored(&'static Specification, Command),
    /// Close the connection: the command is a line of an HTTP request.
    CrossProtocol,
}

impl Session {
    pub(crate) fn new(id: u64, authenticated: bool) -> Self {
        Self { id, protocol: Protocol::Two, authenticated, name: Bytes::new(), closing: false }
    }

    /// Limits on the client's requests.
    pub(crate) fn limits(&self, known: Limits) -> Limits {
        if self.authenticated { known } else { UNAUTHENTICATED_LIMITS }
    }

    /// Looks a command up and checks whether this client may give it.
    pub(crate) fn recognise(&self, names: &Names, command: Command) -> Dispatch {
        let name = command.arguments.first().and_then(Value::contiguous).unwrap_or_default();
        let Some(specification) = names.find(name) else {
            if CROSS_PROTOCOL.iter().any(|line| line.eq_ignore_ascii_case(name)) {
                return Dispatch::CrossProtocol;
            }
            return Dispatch::Answer(if self.authenticated { unknown(name) } else { NO_AUTH });
        };
        let open = matches!(specification.kind, Kind::Auth | Kind::Hello | Kind::Quit | Kind::Reset);
        if !self.authenticated && !open {
            return Dispatch::Answer(NO_AUTH);
        }
        if !specification.takes(&command.arguments) {
            return Dispatch::Answer(wrong_count(specification.name));
        }
        match specification.keys {
            KeyArguments::Connection => Dispatch::Session(specification, command),
            _ => Dispatch::Stored(specification, command),
        }
    }

    /// Answers a command that concerns the connection or the server.
    pub(crate) fn answer<V: Values>(
        &mut self,
        shared: &Shared<V>,
        specification: &'static Specification,
        command: Command,
    ) -> Reply {
        let arguments = command.arguments;
        let done = match specification.kind {
            Kind::Ping => self.ping(&arguments),
            Kind::Echo => Ok(Reply::Bulk(arguments[1].clone())),
            Kind::Hello => self.hello(shared, &arguments),
            Kind::Auth => self.auth(shared, &arguments),
            Kind::Select => match integer(&arguments[1]) {
                Ok(0) => Ok(Reply::OK),
                Ok(_) => Err(Reply::error("ERR DB index is out of range")),
                Err(refusal) => Err(refusal),
            },
            Kind::Client => self.client(&arguments),
            Kind::Quit => {
                self.closing = true;
                Ok(Reply::OK)
            }
            Kind::Reset => {
                *self = Self::new(self.id, shared.config.password.is_none());
                Ok(Reply::Simple("RESET"))
            }
            Kind::Command => server_info::command(&shared.names, &arguments),
            Kind::Config => server_info::config(shared, &arguments),
            Kind::Info => Ok(server_info::info(shared, &arguments)),
            other => Err(Reply::error(format!("ERR {other:?} does not concern the connection"))),
        };
        done.unwrap_or_else(|refusal| refusal)
    }

    fn ping(&self, arguments: &[Value]) -> Result<Reply, Reply> {
        match arguments {
            [_] => Ok(Reply::Simple("PONG")),
            [_, text] => Ok(Reply::Bulk(text.clone())),
            _ => Err(wrong_count("ping")),
        }
    }

    /// `HELLO [version [AUTH name password] [SETNAME name]]`: either all of it takes effect or nothing.
    fn hello<V: Values>(&mut self, shared: &Shared<V>, arguments: &[Value]) -> Result<Reply, Reply> {
        let mut after = Self { name: self.name.clone(), ..*self };
        if let Some(version) = arguments.get(1) {
            after.protocol = match integer(version) {
                Ok(2) => Protocol::Two,
                Ok(3) => Protocol::Three,
                Ok(_) => return Err(Reply::error("NOPROTO unsupported protocol version")),
                Err(_) => return Err(Reply::error("ERR Protocol version is not an integer or out of range")),
            };
        }
        let mut rest = arguments.get(2..).unwrap_or_default();
        while let Some(option) = rest.first() {
            rest = match (word(option).as_str(), &rest[1..]) {
                ("AUTH", [user, password, rest @ ..]) => {
                    after.let_in(shared, Some(user), password)?;
                    rest
                }
                ("SETNAME", [name, rest @ ..]) => {
                    after.name = checked_name(name)?;
                    rest
                }
                _ => return Err(Reply::error("ERR Syntax error in HELLO option")),
            };
        }
        if !after.authenticated {
            return Err(Reply::error(
                "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> \
                 AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol \
                 version at the same time",
            ));
        }
        *self = after;
        Ok(server_info::hello(self))
    }

    fn auth<V: Values>(&mut self, shared: &Shared<V>, arguments: &[Value]) -> Result<Reply, Reply> {
        match arguments {
            [_, password] => self.let_in(shared, None, password)?,
            [_, user, password] => self.let_in(shared, Some(user), password)?,
            _ => return Err(SYNTAX),
        }
        Ok(Reply::OK)
    }

    fn let_in<V: Values>(
        &mut self,
        shared: &Shared<V>,
        user: Option<&Value>,
        password: &Value,
    ) -> Result<(), Reply> {
        let Some(right) = &shared.config.password else {
            return match user {
                // Without a configured password the default user may give any password, as in Redis.
                Some(user) if user.contiguous() == Some(b"default") => Ok(()),
                Some(_) => Err(WRONG_PASSWORD),
                None => Err(Reply::error(
                    "ERR AUTH <password> called without any password configured for the default user. \
                     Are you sure your configuration is correct?",
                )),
            };
        };
        let known = user.is_none_or(|user| user.contiguous() == Some(b"default"));
        if right.is(password.contiguous().unwrap_or_default()) && known {
            self.authenticated = true;
            return Ok(());
        }
        Err(WRONG_PASSWORD)
    }

    fn client(&mut self, arguments: &[Value]) -> Result<Reply, Reply> {
        let subcommand = word(&arguments[1]);
        match (subcommand.as_str(), &arguments[2..]) {
            ("ID", []) => Ok(Reply::Integer(i64::try_from(self.id).unwrap_or(i64::MAX))),
            ("GETNAME", []) if self.name.is_empty() => Ok(Reply::Null),
            ("GETNAME", []) => Ok(Reply::text(self.name.clone())),
            ("SETNAME", [name]) => {
                self.name = checked_name(name)?;
                Ok(Reply::OK)
            }
            ("SETINFO", [_, _]) => Ok(Reply::OK),
            ("INFO" | "LIST", _) => Ok(Reply::text(server_info::client(self))),
            ("NO-EVICT" | "NO-TOUCH", [switch]) if matches!(word(switch).as_str(), "ON" | "OFF") => {
                Ok(Reply::OK)
            }
            ("REPLY", [switch]) if word(switch) == "ON" => Ok(Reply::OK),
            _ => Err(Reply::error(format!(
                "ERR unknown subcommand or wrong number of arguments for '{}'. Try CLIENT HELP.",
                shown(subcommand.as_bytes())
            ))),
        }
    }
}

/// Checks that a name can stand in a list of connections.
fn checked_name(argument: &Value) -> Result<Bytes, Reply> {
    let name = argument.contiguous().filter(|name| name.len() <= NAME_MAX);
    name.filter(|name| name.iter().all(u8::is_ascii_graphic)).map(Bytes::copy_from_slice).ok_or_else(|| {
        Reply::error("ERR Client names cannot contain spaces, newlines or special characters.")
    })
}

/// Shortens and escapes a client's bytes for an error.
fn shown(bytes: &[u8]) -> String {
    bytes[..bytes.len().min(64)].escape_ascii().to_string()
}

fn unknown(name: &[u8]) -> Reply {
    Reply::error(format!("ERR unknown command '{}'", shown(name)))
}

fn wrong_count(name: &str) -> Reply {
    Reply::error(format!("ERR wrong number of arguments for '{name}' command"))
}
