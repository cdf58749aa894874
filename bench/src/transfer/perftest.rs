//! Command lines and tables of the perftest programs (4.5): `ib_write_bw` and its kin.
//!
//! The tables name their columns, so values are found by name. "MB/sec" is 2^20 bytes, as the message rate
//! beside it shows; "Mpps" is 10^6 messages; t_typical is the median.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::args::{Op, Test};

/// One program of the package.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Tool {
    WriteBw,
    WriteLat,
    ReadBw,
    ReadLat,
    SendBw,
    SendLat,
}

impl Tool {
    /// Returns the program that measures the same operation and quantity.
    pub(super) fn matching(op: Op, test: Test) -> Self {
        match (op, test == Test::Lat) {
            (Op::Write | Op::WriteImm, false) => Self::WriteBw,
            (Op::Write | Op::WriteImm, true) => Self::WriteLat,
            (Op::Read, false) => Self::ReadBw,
            (Op::Read, true) => Self::ReadLat,
            (Op::Send, false) => Self::SendBw,
            (Op::Send, true) => Self::SendLat,
        }
    }

    pub(super) fn program(self) -> &'static str {
        match self {
            Self::WriteBw => "ib_write_bw",
            Self::WriteLat => "ib_write_lat",
            Self::ReadBw => "ib_read_bw",
            Self::ReadLat => "ib_read_lat",
            Self::SendBw => "ib_send_bw",
            Self::SendLat => "ib_send_lat",
        }
    }

    fn is_bandwidth(self) -> bool {
        matches!(self, Self::WriteBw | Self::ReadBw | Self::SendBw)
    }
}

/// One run of both ends of a perftest program. Only this is sent to the other end, never a command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PerftestPlan {
    pub(super) tool: Tool,
    pub(super) bytes: u32,
    pub(super) iterations: u64,
    /// Requests in flight, for bandwidth.
    pub(super) depth: u32,
    pub(super) gid_index: Option<u32>,
    pub(super) bidirectional: bool,
    /// TCP port of perftest's own handshake.
    pub(super) port: u16,
}

impl PerftestPlan {
    /// Arguments of either end; the client adds the host.
    pub(super) fn arguments(&self, device: Option<&str>) -> Vec<String> {
        let mut arguments = vec!["-F".to_owned()];
        let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        add("-s", self.bytes.to_string());
        // perftest refuses fewer than five.
        add("-n", self.iterations.max(5).to_string());
        add("-p", self.port.to_string());
        if let Some(device) = device {
            add("-d", device.to_owned());
        }
        if let Some(index) = self.gid_index {
            add("-x", index.to_string());
        }
        if self.tool.is_bandwidth() {
            add("-t", self.depth.to_string());
            if self.bidirectional {
                arguments.push("-b".to_owned());
            }
        }
        arguments
    }
}

/// One line of a table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Measured {
    pub(super) bytes: u64,
    pub(super) iterations: u64,
    pub(super) figures: Figures,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Figures {
    Bandwidth { bytes_per_s: f64, messages_per_s: f64 },
    Latency { typical_us: f64, p99_us: f64, p99_9_us: f64 },
}

/// Parses the lines of the table in an output.
pub(super) fn parse(output: &str) -> Result<Vec<Measured>> {
    let mut lines = output.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
    let Some(header) = lines.next() else {
        let said: Vec<&str> =
            output.lines().map(str::trim).filter(|line| line.len() > 2 && !line.starts_with("--")).collect();
        bail!("no table in the output; it ends: {}", said[said.len().saturating_sub(3)..].join(" | "));
    };
    let columns = columns(header);
    let rows = lines.take_while(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()));
    let measured = rows.map(|line| row(&columns, line)).collect::<Result<Vec<_>>>()?;
    if measured.is_empty() {
        bail!("the table is empty: the run did not end");
    }
    Ok(measured)
}

fn columns(header: &str) -> Vec<String> {
    let mut header = header.to_owned();
    for two_words in ["BW peak", "BW average", "99% percentile", "99.9% percentile", "tps average"] {
        header = header.replace(two_words, &two_words.replace(' ', "_"));
    }
    header.split_whitespace().map(str::to_owned).collect()
}

fn row(columns: &[String], line: &str) -> Result<Measured> {
    let values = line.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>();
    let values = values.with_context(|| format!("a line of the table: '{line}'"))?;
    let find = |name: &str| {
        columns.iter().position(|column| column.starts_with(name)).and_then(|at| values.get(at).copied())
    };
    let need = |name: &str| find(name).with_context(|| format!("no column {name} in {columns:?}"));
    let figures = if let Some(rate) = find("BW_average") {
        let unit = match columns.iter().find(|column| column.starts_with("BW_average")) {
            Some(column) if column.ends_with("[MB/sec]") => f64::from(1 << 20),
            Some(column) if column.ends_with("[Gb/sec]") => 1e9 / 8.0,
            other => bail!("bandwidth in an unknown unit: {other:?}"),
        };
        Figures::Bandwidth { bytes_per_s: rate * unit, messages_per_s: need("MsgRate")? * 1e6 }
    } else {
        Figures::Latency {
            typical_us: need("t_typical")?,
            p99_us: need("99%_percentile")?,
            p99_9_us: need("99.9%_percentile")?,
        }
    };
    Ok(Measured { bytes: need("#bytes")? as u64, iterations: need("#iterations")? as u64, figures })
}

#[cfg(test)]
mod tests {
    use super::*;

    // Recorded from perftest 4.5 over Soft-RoCE in a virtual machine.
    const WRITE_BW_ALL: &str = include_str!("../fixtures/ib_write_bw_all.txt");
    const WRITE_LAT_ALL: &str = include_str!("../fixtures/ib_write_lat_all.txt");
    const READ_BW: &str = include_str!("../fixtures/ib_read_bw.txt");
    const SEND_LAT: &str = include_str!("../fixtures/ib_send_lat.txt");
    const WRITE_LAT_DURATION: &str = include_str!("../fixtures/ib_write_lat_duration.txt");
    const NO_DEVICE: &str = include_str!("../fixtures/no_device.txt");
    const NO_SERVER: &str = include_str!("../fixtures/no_server.txt");

    #[test]
    fn bandwidth_tables() {
        let all = parse(WRITE_BW_ALL).expect("a table");
        assert_eq!(all.len(), 23);
        assert_eq!((all[22].bytes, all[22].iterations), (8 << 20, 50));
        // The message rate has two digits: it is printed in millions.
        for line in all.iter().filter(|line| line.bytes <= 65536).chain(&parse(READ_BW).expect("a table")) {
            let Figures::Bandwidth { bytes_per_s, messages_per_s } = line.figures else { panic!("{line:?}") };
            let ratio = bytes_per_s / (messages_per_s * line.bytes as f64);
            assert!((ratio - 1.0).abs() < 0.11, "2^20 and 10^6 agree: {ratio} in {line:?}");
        }
        let Figures::Bandwidth { bytes_per_s, .. } = parse(READ_BW).expect("a table")[0].figures else {
            panic!()
        };
        assert_eq!(bytes_per_s, 56.75 * 1_048_576.0);
    }

    #[test]
    fn latency_tables() {
        let figures = |typical_us, p99_us, p99_9_us| Figures::Latency { typical_us, p99_us, p99_9_us };
        let one = parse(SEND_LAT).expect("a table");
        assert_eq!(one, [Measured { bytes: 64, iterations: 200, figures: figures(12.43, 814.71, 928.77) }]);
        let all = parse(WRITE_LAT_ALL).expect("a table");
        assert_eq!((all.len(), all[11].bytes, all[11].figures), (23, 4096, figures(52.67, 159.14, 159.14)));
    }

    #[test]
    fn what_has_no_usable_table_says_why() {
        for (output, expected) in [
            (NO_DEVICE, "nosuch not found"),
            (NO_SERVER, "Couldn't connect"),
            (WRITE_LAT_DURATION, "t_typical"),
            ("", "no table"),
            (" #bytes #iterations BW average[MB/sec] MsgRate[Mpps]\n---", "empty"),
            (" #bytes #iterations BW average[MB/sec] MsgRate[Mpps]\n 64 5 x 1\n", "'x'"),
            (" #bytes #iterations BW average[furlongs] MsgRate[Mpps]\n 64 5 1 1\n", "unknown unit"),
            (" #bytes #iterations BW average[MB/sec] MsgRate[Mpps]\n 64 5 1\n", "MsgRate"),
        ] {
            let error = format!("{:#}", parse(output).expect_err("nothing to parse"));
            // The number's parse error does not contain the text; its line does.
            assert!(error.contains(expected.trim_matches('\'')), "{expected}: {error}");
        }
        let gigabits = " #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]\n 64 5 9 8 1\n";
        let Figures::Bandwidth { bytes_per_s, .. } = parse(gigabits).expect("a table")[0].figures else {
            panic!()
        };
        assert_eq!(bytes_per_s, 1e9);
    }

    #[test]
    fn both_ends_get_the_same_options() {
        let mut plan = PerftestPlan {
            tool: Tool::matching(Op::WriteImm, Test::Bw),
            bytes: 65536,
            iterations: 200,
            depth: 128,
            gid_index: Some(1),
            bidirectional: true,
            port: 18600,
        };
        assert_eq!(plan.tool.program(), "ib_write_bw");
        assert_eq!(
            plan.arguments(Some("rxe0")).join(" "),
            "-F -s 65536 -n 200 -p 18600 -d rxe0 -x 1 -t 128 -b"
        );
        plan.tool = Tool::matching(Op::Send, Test::Lat);
        (plan.gid_index, plan.iterations) = (None, 1);
        assert_eq!(plan.arguments(None).join(" "), "-F -s 65536 -n 5 -p 18600");
    }
}
