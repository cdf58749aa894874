//! TLS over loopback with certificates made for each test: accepted and refused peers, and the effects of a
//! reload.

mod client;
mod files;
mod hostile;
mod mutual;
mod reload;
mod support;
