//! Messages, servers and clients that `build.rs` generates from `proto/`. The clients are for tests and
//! tools.

#![allow(missing_docs, unreachable_pub, clippy::all)]

/// The Open Inference Protocol.
pub mod inference {
    tonic::include_proto!("inference");
}

/// The standard health service.
pub mod health {
    tonic::include_proto!("grpc.health.v1");
}
