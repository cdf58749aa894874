//! fio's side, in one process, as fast as it can be told to.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::{DiskArgs, Engine, GIB, MIXED_READS, Measured, Mode, Point, Target};

/// Names of what fio reports on.
const WAYS: [&str; 3] = ["read", "write", "mixed"];

/// The same point by fio.
pub(super) fn fio(args: &DiskArgs, target: &Target, point: Point, seed: u64) -> Result<Measured> {
    let mut command = Command::new("fio");
    let engine = match args.engine {
        Engine::IoUring => "io_uring",
        Engine::Pread => "psync",
        Engine::NvmePassthrough => "io_uring_cmd",
    };
    command
        .args(["--name=disk", "--output-format=json", "--direct=1", "--norandommap"])
        .args(["--random_generator=tausworthe64", "--percentile_list=50:99:99.9", "--group_reporting"])
        // From submission to completion, as ours.
        .args(["--lat_percentiles=1", "--clat_percentiles=0"])
        .args(["--time_based", "--invalidate=0", "--allow_file_create=0"])
        .arg(format!("--filename={}", target.path().display()))
        .arg(format!("--ioengine={engine}"))
        .arg(format!("--bs={}", point.size))
        .arg(format!("--runtime={}ms", (args.seconds * 1e3) as u64))
        .arg(format!("--randseed={seed}"));
    match point.mode {
        Mode::Read => command.arg("--rw=randread"),
        Mode::Write => command.arg("--rw=randwrite"),
        // Both ways in one histogram, as ours.
        Mode::Mixed => command
            .args(["--rw=randrw", "--unified_rw_reporting=mixed"])
            .arg(format!("--rwmixread={MIXED_READS}")),
    };
    if let Some(bytes) = target.file_bytes() {
        command.arg(format!("--size={bytes}"));
    }
    match args.engine {
        // One request for each thread.
        Engine::Pread => command.arg(format!("--numjobs={}", point.depth)),
        Engine::IoUring | Engine::NvmePassthrough => {
            command.arg(format!("--iodepth={}", point.depth)).args(["--fixedbufs=1", "--registerfiles=1"])
        }
    };
    if args.engine == Engine::NvmePassthrough {
        command.arg("--cmd_type=nvme");
    }
    if args.io_poll {
        command.arg("--hipri");
    }
    let output = command.stdin(Stdio::null()).output().context("start fio")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("fio: {}{}", text, String::from_utf8_lossy(&output.stderr));
    }
    parse(&text).with_context(|| format!("output of fio on {}", target.path().display()))
}

/// fio's figures: of whichever of reads, writes and both as one there are.
fn parse(text: &str) -> Result<Measured> {
    // Notes of fio may stand before the object.
    let start = text.find('{').context("no JSON")?;
    let report: serde_json::Value = serde_json::from_str(&text[start..])?;
    let job = report.pointer("/jobs/0").context("no job")?;
    let number = |path: &str| job.pointer(path).and_then(serde_json::Value::as_f64).unwrap_or(0.0);
    let each = |path: &str| WAYS.map(|way| number(&format!("/{way}/{path}")));
    let moved: f64 = each("io_bytes").iter().sum();
    let run_ms = each("runtime").into_iter().fold(0.0, f64::max);
    ensure!(moved > 0.0 && run_ms > 0.0, "fio moved nothing");
    // Percentages of a core, for the sum of the jobs' times.
    let cpu = (number("/usr_cpu") + number("/sys_cpu")) / 100.0 * number("/job_runtime") / 1e3;
    let at = |name: &str| each(&format!("lat_ns/percentile/{name}")).into_iter().fold(0.0, f64::max) / 1e3;
    Ok(Measured {
        bytes_per_s: moved / (run_ms / 1e3),
        cpu_s_per_gib: cpu / (moved / GIB),
        p50_us: at("50.000000"),
        p99_us: at("99.000000"),
        p99_9_us: at("99.900000"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_fio_is_read_and_other_output_is_an_error() {
        let text = r#"note: something
            {"jobs": [{"job_runtime": 2000, "usr_cpu": 10.0, "sys_cpu": 15.0,
            "read": {"io_bytes": 1073741824, "runtime": 1000, "lat_ns": {"percentile": {"50.000000": 82000, "99.000000": 90000}}},
            "write": {"io_bytes": 1073741824, "runtime": 1001, "lat_ns": {"percentile": {"50.000000": 93000}}}}]}"#;
        let measured = parse(text).expect("a report");
        assert_eq!((measured.p50_us, measured.p99_us, measured.p99_9_us), (93.0, 90.0, 0.0));
        assert_eq!(measured.cpu_s_per_gib, 0.25);
        assert!((measured.bytes_per_s - 2.0 * GIB / 1.001).abs() < 1.0);
        for text in ["", "{}", "fio: no such file", r#"{"jobs": [{"read": {"io_bytes": 0}}]}"#] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
