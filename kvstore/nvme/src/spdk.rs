//! The same trait over an installed SPDK, for machines where SPDK has the devices already.
//!
//! `library` is the C interface, loaded at run time; [`SpdkEngine`] drives one queue pair of one namespace. Only calls
//! are used whose signatures have been the same since SPDK 18, and no structure of SPDK's but the two that it has only
//! room for: options are its defaults. What was proven without SPDK: order of arguments, callbacks and errors, against
//! a small library in C that has these functions over a file. It was never run on SPDK itself. After a reset that failed
//! the memory of commands in flight is leaked on purpose; see [`SpdkEngine::abandoned_commands`].

mod config;
mod engine;
mod flow;
mod io_engine;
mod library;
mod open;
mod recovery;

pub use config::SpdkConfig;
pub use engine::SpdkEngine;
