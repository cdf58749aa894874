//! Stop strings in a stream of text.

/// Finds stop strings that may be spread over several pieces, and holds back text that may become one.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<String>,
    include: bool,
    held: String,
}

impl StopStrings {
    /// Searches for `stops`; with `include`, the one that is found stays in the output.
    #[must_use]
    pub fn new(stops: Vec<String>, include: bool) -> Self {
        Self { stops, include, held: String::new() }
    }

    /// Adds a piece; returns the text that may be shown, and whether a stop string was found (which ends the output).
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        if self.stops.is_empty() {
            return (piece.to_owned(), false);
        }
        self.held.push_str(piece);
        let found = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at, stop.len())))
            .min_by_key(|&(at, len)| (at, usize::MAX - len));
        if let Some((at, len)) = found {
            self.held.truncate(if self.include { at + len } else { at });
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self.possible_start();
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// Returns the text that is held back, when the stream ends without a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length of the longest suffix of the held text that is a prefix of a stop string.
    fn possible_start(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0).saturating_sub(1);
        (1..=longest.min(self.held.len()))
            .rev()
            .find(|&len| {
                let at = self.held.len() - len;
                self.held.is_char_boundary(at)
                    && self.stops.iter().any(|stop| stop.starts_with(&self.held[at..]))
            })
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shown text is the same for every division of the text.
    #[test]
    fn cuts_do_not_matter() {
        let text = "one two STOé three";
        for (stops, include, expected, stopped) in [
            (vec!["STOé"], false, "one two ", true),
            (vec!["STOé"], true, "one two STOé", true),
            (vec!["STOP", "x"], false, text, false),
            (vec!["two", "one t"], false, "", true),
            (vec![" three", "ree"], false, "one two STOé", true),
        ] {
            let stops: Vec<String> = stops.into_iter().map(str::to_owned).collect();
            for cut in 0..=text.len() {
                for second in cut..=text.len() {
                    if !text.is_char_boundary(cut) || !text.is_char_boundary(second) {
                        continue;
                    }
                    let mut matcher = StopStrings::new(stops.clone(), include);
                    let (mut shown, mut found) = (String::new(), false);
                    for piece in [&text[..cut], &text[cut..second], &text[second..]] {
                        if !found {
                            let (now, stop) = matcher.push(piece);
                            shown.push_str(&now);
                            found = stop;
                        }
                    }
                    if !found {
                        shown.push_str(&matcher.finish());
                    }
                    assert_eq!((shown.as_str(), found), (expected, stopped), "{stops:?} cut {cut},{second}");
                }
            }
        }
    }
}
