//! Tests of the object tier against a directory and against an S3 service with real HTTP (`support/server.rs`).

mod damage;
mod directory;
mod external;
mod faulty;
mod s3;
mod secrets;
mod support;
