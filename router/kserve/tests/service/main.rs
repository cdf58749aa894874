//! The service over its own server: answers, streams, errors.

mod support;

mod server;
mod streaming;
mod unary;
