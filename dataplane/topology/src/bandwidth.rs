//! Bandwidth of a link, computed from its reported speed. All results are ceilings in 10⁹ bytes per second.
//!
//! Sources: PCI Express Base Specification 6.0 §4.2 (8b/10b up to 5 GT/s, 128b/130b up to 32 GT/s, 236 of
//! the 256 bytes of a flit above); `iboe_get_mtu` in the kernel's include/rdma/ib_addr.h (RoCE path MTU);
//! InfiniBand Architecture Specification 1.2.1 §5.2 (header sizes).

/// Returns the bandwidth of one direction of a PCIe link after encoding. Headers of transaction packets are
/// not subtracted: they cost about a tenth at 256 bytes of payload. `None` for an unknown speed.
#[must_use]
pub fn pcie_gb_s(speed_mt_s: u32, lanes: u32) -> Option<f64> {
    let encoding = match speed_mt_s {
        2_500 | 5_000 => 8.0 / 10.0,
        8_000 | 16_000 | 32_000 => 128.0 / 130.0,
        64_000 | 128_000 => 236.0 / 256.0,
        _ => return None,
    };
    (1..=32).contains(&lanes).then(|| f64::from(speed_mt_s) / 8_000.0 * f64::from(lanes) * encoding)
}

/// Returns the PCIe generation of a speed.
pub(crate) fn pcie_generation(speed_mt_s: u32) -> Option<u32> {
    [2_500, 5_000, 8_000, 16_000, 32_000, 64_000, 128_000]
        .iter()
        .position(|&speed| speed == speed_mt_s)
        .and_then(|index| u32::try_from(index + 1).ok())
}

/// Returns the RoCE path MTU that the kernel derives from an interface's MTU, in bytes; `None` below 256.
#[must_use]
pub fn path_mtu_of_roce(interface_mtu_bytes: u32) -> Option<u32> {
    // Global route 40, UDP 8, base transport 12, XRC 4, atomic 28, invariant CRC 4.
    const HEADER_BYTES: u32 = 96;
    let payload = interface_mtu_bytes.checked_sub(HEADER_BYTES)?;
    [4096, 2048, 1024, 512, 256].into_iter().find(|&mtu| payload >= mtu)
}

/// Returns the payload bandwidth of RoCE v2 over IPv4 with full packets.
#[must_use]
pub fn roce_gb_s(rate_gbit_s: f64, path_mtu_bytes: u32) -> f64 {
    // Preamble and gap 20, Ethernet 18, IPv4 20, UDP 8, base transport 12, invariant CRC 4.
    const HEADER_BYTES: f64 = 82.0;
    rate_gbit_s / 8.0 * f64::from(path_mtu_bytes) / (f64::from(path_mtu_bytes) + HEADER_BYTES)
}

/// Returns the payload bandwidth of InfiniBand with packets of 4096 bytes inside one subnet.
#[must_use]
pub fn infiniband_gb_s(rate_gbit_s: f64) -> f64 {
    // Local route 8, base transport 12, invariant CRC 4, variant CRC 2.
    rate_gbit_s / 8.0 * 4096.0 / (4096.0 + 26.0)
}

/// Returns the payload bandwidth of TCP over IPv4 with timestamps and full packets; `None` for an MTU that
/// holds no payload.
#[must_use]
pub fn tcp_gb_s(rate_gbit_s: f64, interface_mtu_bytes: u32) -> Option<f64> {
    // IPv4 20, TCP 20, timestamps 12 inside the MTU; preamble, gap, Ethernet 38 outside.
    let payload = interface_mtu_bytes.checked_sub(52).filter(|&bytes| bytes > 0)?;
    Some(rate_gbit_s / 8.0 * f64::from(payload) / (f64::from(interface_mtu_bytes) + 38.0))
}

/// Returns the smallest of the known values.
pub(crate) fn least(values: impl IntoIterator<Item = Option<f64>>) -> Option<f64> {
    values.into_iter().flatten().reduce(f64::min)
}

/// Formats a bandwidth like `49.0 GB/s`, or as unknown.
pub(crate) fn show_gb_s(value: Option<f64>) -> String {
    value.map_or_else(|| "bandwidth unknown".to_owned(), |value| format!("{value:.1} GB/s"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pcie_matches_the_published_table() {
        for (speed, lanes, expected) in [
            (2_500, 16, 4.0),
            (5_000, 8, 4.0),
            (8_000, 16, 15.754),
            (16_000, 16, 31.508),
            (32_000, 16, 63.015),
            (64_000, 16, 118.0),
        ] {
            let found = pcie_gb_s(speed, lanes).expect("a known speed");
            assert!((found - expected).abs() < 0.001, "{speed} x{lanes}: {found}");
        }
        for (speed, lanes) in [(0, 16), (32_000, 0), (32_000, 255), (31_999, 1), (u32::MAX, u32::MAX)] {
            assert_eq!(pcie_gb_s(speed, lanes), None);
        }
        assert_eq!(pcie_generation(32_000), Some(5));
        assert_eq!(pcie_generation(3), None);
    }

    #[test]
    fn roce_mtu_follows_the_kernel() {
        for (interface, path) in [
            (1500, Some(1024)),
            (9000, Some(4096)),
            (4200, Some(4096)),
            (4191, Some(2048)),
            (351, None),
            (0, None),
        ] {
            assert_eq!(path_mtu_of_roce(interface), path, "{interface}");
        }
        assert!((roce_gb_s(400.0, 4096) - 49.02).abs() < 0.01);
        assert!((roce_gb_s(400.0, 1024) - 46.29).abs() < 0.01);
        assert_eq!(tcp_gb_s(10.0, 52), None);
    }
}
