//! TLS over loopback with certificates made for each test: who gets in, who does not, and what a reload changes.

mod client;
mod files;
mod hostile;
mod mutual;
mod reload;
mod support;
