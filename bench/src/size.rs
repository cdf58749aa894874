//! Numbers of bytes as people write them.

/// `4096`, `4K`, `4KiB`, `5MiB`, `1GiB`.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| format!("'{text}' does not start with a number"))?;
    let shift = match unit {
        "" | "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        _ => return Err(format!("'{unit}' is no unit of bytes: KiB, MiB and GiB are")),
    };
    number.checked_mul(1 << shift).filter(|&bytes| bytes > 0).ok_or_else(|| format!("'{text}' is not usable"))
}

/// In the largest unit that gives a whole number.
pub(crate) fn render(bytes: u64) -> String {
    match bytes {
        _ if bytes.is_multiple_of(1 << 30) => format!("{} GiB", bytes >> 30),
        _ if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, expected) in
            [("4096", 4096), ("4K", 4096), ("128KiB", 131_072), ("5MiB", 5 << 20), ("1G", 1 << 30)]
        {
            assert_eq!(parse(text), Ok(expected));
        }
        for text in ["", "KiB", "4kb", "0", "99999999999GiB"] {
            assert!(parse(text).is_err(), "{text}");
        }
        for (bytes, expected) in
            [(4095, "4095 B"), (128 << 10, "128 KiB"), (3 << 20, "3 MiB"), (10 << 30, "10 GiB")]
        {
            assert_eq!(render(bytes), expected);
        }
    }
}
