//! Ids of tool calls: equal seed, equal ids.

/// The shape of a generated id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IdFormat {
    /// `call_` and 24 hexadecimal digits, as OpenAI's API has them.
    OpenAi,
    /// Nine letters or digits: Mistral's chat templates refuse any other id in the next request.
    Mistral,
}

/// Makes the ids of one output's tool calls.
#[derive(Debug, Clone)]
pub struct CallIds {
    state: u64,
    format: IdFormat,
}

impl CallIds {
    /// Ids that follow from `seed` alone. Give each request another seed, or two of its turns may share an
    /// id.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self { state: seed, format: IdFormat::OpenAi }
    }

    pub(crate) fn for_mistral(mut self) -> Self {
        self.format = IdFormat::Mistral;
        self
    }

    pub(crate) fn next_id(&mut self) -> String {
        match self.format {
            IdFormat::OpenAi => {
                let (high, low) = (self.next_word(), self.next_word());
                format!("call_{high:016x}{:08x}", low >> 32)
            }
            IdFormat::Mistral => {
                const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
                let mut word = self.next_word();
                let mut id = String::with_capacity(9);
                for _ in 0..9 {
                    id.push(char::from(LETTERS[(word % 62) as usize]));
                    word /= 62;
                }
                id
            }
        }
    }

    /// SplitMix64 (Steele, Lea and Flood 2014): valid for every seed, unlike xorshift, which fails for 0.
    fn next_word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}
