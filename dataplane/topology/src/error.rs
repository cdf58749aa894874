//! Errors of the topology and of path requests.

/// Errors in the input of a user or a peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// A peer's description is not in the format that this version reads.
    #[error("node description, line {line}: {problem}")]
    Description {
        /// Line number, from 1.
        line: usize,
        /// Fault in the line.
        problem: &'static str,
    },
    /// The text is not in any notation of a place.
    #[error("'{0}' names no place; examples: gpu0, 0000:17:00.0, host, host:1, mlx5_0, node2:gpu0")]
    Place(String),
    /// The notation is valid, but the place is not on the node.
    #[error("'{place}' is not on {node}; there are: {known}")]
    NotThere {
        /// The place that was asked for.
        place: String,
        /// Name of the node.
        node: String,
        /// The places that exist.
        known: String,
    },
    /// The place is not a memory.
    #[error("'{0}' is no memory; examples: gpu0, 0000:17:00.0, host, host:1")]
    NoMemory(String),
    /// No description of that node was given.
    #[error("node '{0}' is unknown; pass a file with its description")]
    NodeUnknown(String),
    /// The path starts at another node.
    #[error("'{0}' is on another node; a path is explained from this node to another, so name it second")]
    StartsElsewhere(String),
}
