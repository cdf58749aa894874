//! fio's side of the comparison, with the same engine, depth, batches, pages and kind of contents.
//!
//! fio's processor time is not the one of its report, which leaves out the kernel's workers for io_uring, but
//! the one that the kernel counts for the whole process: start, buffers, report and workers. The start alone,
//! in which fio calibrates its clock, took 0.15 s on the machine where this was written, so [`start_seconds`]
//! is shown beside the figures.

use std::mem::MaybeUninit;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::{DiskArgs, Engine, GIB, MIXED_READS, Measured, Mode, Point, Target};

/// Names of the sections of fio's report.
const WAYS: [&str; 3] = ["read", "write", "mixed"];

/// Measures one point with fio.
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
        // Random bytes are generated once; by default each write would change a few of them.
        .args(["--scramble_buffers=0", "--iomem=mmapshared"])
        // Latency from submission to completion, as on our side.
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
        // Reads and writes in one histogram, as on our side.
        Mode::Mixed => command
            .args(["--rw=randrw", "--unified_rw_reporting=mixed"])
            .arg(format!("--rwmixread={MIXED_READS}")),
    };
    if let Some(bytes) = target.file_bytes() {
        command.arg(format!("--size={bytes}"));
    }
    match args.engine {
        // One request per job, as one per thread on our side.
        Engine::Pread => command.arg(format!("--numjobs={}", point.depth)),
        Engine::IoUring | Engine::NvmePassthrough => {
            let batch = args.batch(point.depth);
            command
                .arg(format!("--iodepth={}", point.depth))
                .args(["--fixedbufs=1", "--registerfiles=1"])
                // By default fio submits requests one by one.
                .arg(format!("--iodepth_batch_submit={batch}"))
                .arg("--iodepth_batch_complete_min=1")
                .arg(format!("--iodepth_batch_complete_max={batch}"))
                .args(args.io_poll.then_some("--hipri"))
        }
    };
    if args.engine == Engine::NvmePassthrough {
        command.arg("--cmd_type=nvme");
    }
    let cpu = children_seconds()?;
    let output = command.stdin(Stdio::null()).output().context("start fio")?;
    let cpu = children_seconds()? - cpu;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("fio: {}{}", text, String::from_utf8_lossy(&output.stderr));
    }
    parse(&text, cpu).with_context(|| format!("output of fio on {}", target.path().display()))
}

/// Processor time of a fio that starts and does no I/O: a part of the time of each run.
pub(super) fn start_seconds() -> Result<f64> {
    let before = children_seconds()?;
    let output = Command::new("fio").args(["--parse-only", "--name=start"]).stdin(Stdio::null()).output();
    let output = output.context("start fio")?;
    ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr));
    Ok(children_seconds()? - before)
}

/// User and system time of all ended children, including their children and the kernel's workers.
fn children_seconds() -> Result<f64> {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a whole `rusage` that lives through the call, and the kernel only writes to it.
    let failed = unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr()) };
    ensure!(failed == 0, "getrusage: {}", std::io::Error::last_os_error());
    // SAFETY: integers only, for which zeros are values, and the kernel has filled it in.
    let usage = unsafe { usage.assume_init() };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Ok(seconds(usage.ru_utime) + seconds(usage.ru_stime))
}

/// Parses fio's figures, of whichever section there is, with the processor time that it took.
fn parse(text: &str, cpu_s: f64) -> Result<Measured> {
    // fio may write notes before the object.
    let start = text.find('{').context("no JSON")?;
    let report: serde_json::Value = serde_json::from_str(&text[start..])?;
    let job = report.pointer("/jobs/0").context("no job")?;
    let number = |path: &str| job.pointer(path).and_then(serde_json::Value::as_f64).unwrap_or(0.0);
    let each = |path: &str| WAYS.map(|way| number(&format!("/{way}/{path}")));
    let moved: f64 = each("io_bytes").iter().sum();
    let run_ms = each("runtime").into_iter().fold(0.0, f64::max);
    ensure!(moved > 0.0 && run_ms > 0.0, "fio moved nothing");
    let at = |name: &str| each(&format!("lat_ns/percentile/{name}")).into_iter().fold(0.0, f64::max) / 1e3;
    Ok(Measured {
        bytes_per_s: moved / (run_ms / 1e3),
        cpu_s_per_gib: cpu_s / (moved / GIB),
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
            {"jobs": [{"job_runtime": 2000, "usr_cpu": 1.0, "sys_cpu": 1.5,
            "read": {"io_bytes": 1073741824, "runtime": 1000, "lat_ns": {"percentile": {"50.000000": 82000, "99.000000": 90000}}},
            "write": {"io_bytes": 1073741824, "runtime": 1001, "lat_ns": {"percentile": {"50.000000": 93000}}}}]}"#;
        let measured = parse(text, 0.5).expect("a report");
        assert_eq!((measured.p50_us, measured.p99_us, measured.p99_9_us), (93.0, 90.0, 0.0));
        assert_eq!(measured.cpu_s_per_gib, 0.25);
        assert!((measured.bytes_per_s - 2.0 * GIB / 1.001).abs() < 1.0);
        for text in ["", "{}", "fio: no such file", r#"{"jobs": [{"read": {"io_bytes": 0}}]}"#] {
            assert!(parse(text, 0.5).is_err(), "{text}");
        }
    }

    #[test]
    fn the_processor_time_of_a_child_and_of_its_child_counts() {
        let before = children_seconds().expect("usage");
        // The inner shell is a child of the outer one.
        let script = "sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'; true";
        let status = Command::new("sh").args(["-c", script]).status().expect("a shell");
        assert!(status.success());
        let spent = children_seconds().expect("usage") - before;
        assert!(spent > 0.01, "{spent} s for 200,000 turns of a shell's loop");
    }
}
