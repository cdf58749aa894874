/// What can be wrong with what a user or a peer says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// A peer's description is not in the format that this version reads.
    #[error("node description, line {line}: {problem}")]
    Description {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A place is not written in any known way.
    #[error("'{0}' names no place; examples: gpu0, 0000:17:00.0, host, host:1, mlx5_0, node2:gpu0")]
    Place(String),
    /// The place is well written but is not on the node.
    #[error("'{place}' is not on {node}; there are: {known}")]
    NotThere {
        /// What was asked for.
        place: String,
        /// Where it was looked for.
        node: String,
        /// What could have been named.
        known: String,
    },
    /// The place holds no bytes.
    #[error("'{0}' is no memory; examples: gpu0, 0000:17:00.0, host, host:1")]
    NoMemory(String),
    /// No description of that node was given.
    #[error("nothing is known of the node '{0}'; give a file with its description")]
    NodeUnknown(String),
    /// The path starts at another node.
    #[error("'{0}' is on another node; a path is explained from this node to another, so name it second")]
    StartsElsewhere(String),
}
