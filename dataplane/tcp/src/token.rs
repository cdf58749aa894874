//! Tokens: the identity of an operation in its completion.

/// The operation that a completion belongs to, packed into its user data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) kind: OperationKind,
    pub(crate) connection: u32,
    /// Sequence number of a zero-copy send on its connection.
    pub(crate) sequence: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OperationKind {
    /// A poll of the handshakes' descriptor: an operation of the node, not of a connection.
    Handshakes,
    Receive,
    Send,
    Cancel,
}

impl Token {
    pub(crate) fn of(kind: OperationKind, connection: u32) -> Self {
        Self { kind, connection, sequence: 0 }
    }

    pub(crate) fn pack(self) -> u64 {
        u64::from(self.sequence) << 32 | u64::from(self.connection) << 4 | self.kind as u64
    }

    pub(crate) fn unpack(word: u64) -> Self {
        let kind = match word & 15 {
            0 => OperationKind::Handshakes,
            1 => OperationKind::Receive,
            2 => OperationKind::Send,
            _ => OperationKind::Cancel,
        };
        Self { kind, connection: (word as u32) >> 4, sequence: (word >> 32) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back() {
        for (kind, connection, sequence) in [
            (OperationKind::Handshakes, 0, 0),
            (OperationKind::Send, (1 << 20) - 1, u32::MAX),
            (OperationKind::Receive, 3, 0),
            (OperationKind::Cancel, 7, 1),
        ] {
            let token = Token { kind, connection, sequence };
            assert_eq!(Token::unpack(token.pack()), token);
        }
    }
}
