//! Numbers as short text.

use std::time::Duration;

use crate::history::Quantile;

/// Text of an unknown value.
pub(super) const UNKNOWN: &str = "-";

/// `999`, `1.2k`, `34k`, `5.6M`.
pub(super) fn number(value: f64) -> String {
    if !value.is_finite() {
        return UNKNOWN.to_owned();
    }
    let scales = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    // A value that rounds up to the next scale is shown in that scale.
    let Some((scale, letter)) = scales.into_iter().find(|(scale, _)| value.abs() >= scale * 0.9995) else {
        return if value.fract() == 0.0 || value.abs() >= 99.95 {
            format!("{value:.0}")
        } else {
            format!("{value:.1}")
        };
    };
    let scaled = value / scale;
    if scaled.abs() >= 99.95 { format!("{scaled:.0}{letter}") } else { format!("{scaled:.1}{letter}") }
}

/// A count, or the text for an unknown one.
pub(super) fn count(value: Option<u64>) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), |value| number(value as f64))
}

/// A share as percent.
pub(super) fn percent(share: Option<f64>) -> String {
    match share.filter(|share| share.is_finite()) {
        Some(share) => format!("{:.0}%", (share * 100.0).clamp(-999.0, 9999.0)),
        None => UNKNOWN.to_owned(),
    }
}

/// `850ns`, `4.5us`, `12ms`, `3.2s`, `75s`.
pub(super) fn seconds(value: f64) -> String {
    let (scaled, unit) = match value {
        value if !value.is_finite() => return UNKNOWN.to_owned(),
        value if value >= 0.9995 => (value, "s"),
        value if value >= 0.999_5e-3 => (value * 1e3, "ms"),
        value if value >= 0.999_5e-6 => (value * 1e6, "us"),
        value => (value.max(0.0) * 1e9, "ns"),
    };
    // Three digits; a whole number without the zero behind its point.
    let text = match scaled {
        scaled if scaled >= 99.95 => format!("{scaled:.0}"),
        scaled if scaled >= 9.995 => format!("{scaled:.1}"),
        scaled => format!("{scaled:.2}"),
    };
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

/// A quantile, or the bound that it exceeds.
pub(super) fn quantile(value: Quantile) -> String {
    match value {
        Quantile::Unknown => UNKNOWN.to_owned(),
        Quantile::About(value) => seconds(value),
        Quantile::Above(bound) => format!(">{}", seconds(bound)),
    }
}

/// `42s`, `3m07s`, `5h12m`, `9d04h`.
pub(super) fn span(span: Duration) -> String {
    let seconds = span.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m{:02}s", seconds % 60),
        3600..86400 => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

/// `512 B`, `32.0 KiB`.
pub(super) fn bytes(value: Option<u64>) -> String {
    let Some(value) = value else { return UNKNOWN.to_owned() };
    let scales = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match scales.into_iter().find(|(bits, _)| value >> bits > 0) {
        Some((bits, unit)) => format!("{:.1} {unit}", value as f64 / (1_u64 << bits) as f64),
        None => format!("{value} B"),
    }
}

/// A bar of `width` cells of which `share` is full, to an eighth of a cell.
pub(super) fn bar(share: f64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
    let eighths = (share * width as f64 * 8.0).round() as usize;
    // A share above zero shows at least one eighth of a cell.
    let eighths = if share > 0.0 && width > 0 { eighths.max(1) } else { eighths };
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        for (value, text) in [
            (0.0, "0"),
            (3.0, "3"),
            (3.25, "3.2"),
            (250.4, "250"),
            (999.0, "999"),
            (999.7, "1.0k"),
            (1234.0, "1.2k"),
            (123_456.0, "123k"),
            (5.6e6, "5.6M"),
            (1.8e19, "18446744T"),
            (f64::NAN, "-"),
        ] {
            let given = if value == 1.8e19 { u64::MAX as f64 } else { value };
            assert_eq!(number(given), text);
        }
        for (value, text) in [
            (0.0, "0ns"),
            (0.000_000_5, "500ns"),
            (0.0005, "500us"),
            (0.0121, "12.1ms"),
            (0.1, "100ms"),
            (0.9999, "1s"),
            (2.5, "2.5s"),
            (60.0, "60s"),
            (300.0, "300s"),
            (f64::INFINITY, "-"),
            (-1.0, "0ns"),
        ] {
            assert_eq!(seconds(value), text, "{value}");
        }
        for (seconds, text) in [(0, "0s"), (59, "59s"), (187, "3m07s"), (18_720, "5h12m"), (792_000, "9d04h")]
        {
            assert_eq!(span(Duration::from_secs(seconds)), text);
        }
        for (value, text) in [(None, "-"), (Some(512), "512 B"), (Some(32_768), "32.0 KiB")] {
            assert_eq!(bytes(value), text);
        }
        assert_eq!(
            (percent(None), percent(Some(0.638)), percent(Some(1e300))),
            ("-".into(), "64%".into(), "9999%".into())
        );
    }

    #[test]
    fn bars() {
        for (share, width, text) in [
            (0.0, 4, ""),
            (0.5, 4, "██"),
            (1.0, 4, "████"),
            (7.0, 4, "████"),
            (0.001, 4, "▏"),
            (0.40625, 4, "█▋"),
            (f64::NAN, 4, ""),
            (1.0, 0, ""),
        ] {
            assert_eq!(bar(share, width), text, "{share} of {width}");
        }
    }
}
