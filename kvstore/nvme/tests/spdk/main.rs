//! The engine over SPDK, against a library in C that has SPDK's functions over a file: `mock.c`, compiled here. What is
//! exercised for real is the order of arguments, the callbacks and the paths of errors; not SPDK.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_io::testing::{Conformance, conformance};
use kvstore_io::{Buffer, Completion, IoEngine, IoErrorKind, Operation, PageBuffer, Request};
use kvstore_nvme::NvmeError;
use kvstore_nvme::spdk::{SpdkConfig, SpdkEngine};

const FILE_BYTES: u64 = 32 << 20;

/// Compiles a shared library; false without a compiler.
fn compile(source: &Path, target: &Path, more: &[&str]) -> bool {
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-x", "c", "-o"]);
    match compiler.arg(target).args(more).arg(source).status() {
        Err(error) => {
            eprintln!("SKIPPED: cc cannot be run: {error}");
            false
        }
        Ok(status) => {
            assert!(status.success(), "cc failed on {}", source.display());
            true
        }
    }
}

fn mock_source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/spdk/mock.c")
}

/// The compiled library, or `None` without a compiler.
fn library() -> Option<&'static Path> {
    static LIBRARY: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let target =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("spdk-mock-{}.so", std::process::id()));
        compile(&mock_source(), &target, &[]).then_some(target)
    };
    LIBRARY.get_or_init(build).as_deref()
}

/// The mock's variables, and a file for the device; one test has them at a time.
struct Mock {
    loaded: libloading::Library,
    file: PathBuf,
    config: SpdkConfig,
    _turn: MutexGuard<'static, ()>,
}

impl Mock {
    fn new() -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let library = library()?;
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the library has no initialisers.
        let loaded = unsafe { libloading::Library::new(library) }.expect("the mock loads");
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("spdk-device-{}", std::process::id()));
        std::fs::File::create(&file).expect("file").set_len(FILE_BYTES).expect("size");
        let config = SpdkConfig {
            libraries: vec![library.to_owned()],
            transfer_bytes_max: 1 << 20,
            command_timeout: Duration::from_millis(100),
            ..SpdkConfig::new(format!("trtype:PCIe traddr:{}", file.display()))
        };
        Some(Self { loaded, file, config, _turn: turn })
    }

    fn variable(&self, name: &str) -> *mut i64 {
        // SAFETY: every variable of that prefix is an `int64_t`.
        let symbol = unsafe { self.loaded.get::<*mut i64>(name.as_bytes()) };
        *symbol.expect(name)
    }

    fn set(&self, name: &str, value: i64) {
        // SAFETY: the variable lives as long as the library; the engines of this test run in this thread.
        unsafe { self.variable(name).write(value) };
    }

    fn get(&self, name: &str) -> i64 {
        // SAFETY: as in `set`.
        unsafe { self.variable(name).read() }
    }

    fn open(&self) -> Rig {
        let mut engine = SpdkEngine::open(&self.config).expect("open");
        let layout = SlabLayout { slot_bytes: 64 << 10, slot_count: 200 };
        let slab = Slab::create("spdk test", layout, PageSize::Standard).expect("slab");
        let slots = SlotPool::new(Arc::new(slab));
        engine.register(slots.slab()).expect("register");
        Rig { engine, slots }
    }

    /// Checks that nothing is left, and that no call was made that SPDK would refuse.
    fn close(&self, rig: Rig) {
        let Rig { engine, slots } = rig;
        drop(engine);
        assert_eq!(slots.used_count(), 0, "every slot was given back");
        self.check();
    }

    fn call(&self, name: &str) -> i64 {
        // SAFETY: the functions that are called take nothing and return an `int64_t`.
        let function = unsafe { self.loaded.get::<unsafe extern "C" fn() -> i64>(name.as_bytes()) };
        let function = function.expect(name);
        // SAFETY: as above.
        unsafe { function() }
    }

    fn check(&self) {
        assert_eq!(self.call("mock_memories"), 0, "all memory was freed and unregistered");
        for name in ["mock_violations", "mock_pairs", "mock_controllers"] {
            assert_eq!(self.get(name), 0, "{name}");
        }
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        // Restore the defaults for the next test.
        self.set("mock_bad_lba", -1);
        for name in [
            "mock_lose",
            "mock_completions_errno",
            "mock_reset_fails",
            "mock_register_errno",
            "mock_unmapped",
            "mock_resets",
        ] {
            self.set(name, 0);
        }
        let _ = std::fs::remove_file(&self.file);
    }
}

struct Rig {
    engine: SpdkEngine,
    slots: Arc<SlotPool>,
}

impl Rig {
    fn read(&mut self, id: u64) {
        let buffer = Buffer::Slot { slot: self.slots.acquire().expect("slot"), offset: 0, len: 4096 };
        let request = Request { id, operation: Operation::Read, file: 0, offset: id * 4096, buffer };
        self.engine.submit(request).expect("room");
    }

    fn collect(&mut self) -> Vec<Completion> {
        self.engine.flush().expect("flush");
        let (mut completions, started) = (Vec::new(), Instant::now());
        while self.engine.in_flight() > 0 {
            if self.engine.poll(usize::MAX, &mut completions) == 0 {
                assert!(started.elapsed() < Duration::from_secs(30), "{} stuck", self.engine.in_flight());
                self.engine.wait(Some(Instant::now() + Duration::from_millis(20))).expect("wait");
            }
        }
        completions.sort_by_key(|completion| completion.id);
        completions
    }

    /// Returns the results of eight reads.
    fn eight_reads(&mut self) -> Vec<Option<IoErrorKind>> {
        (0..8).for_each(|id| self.read(id));
        let kind = |completion: Completion| completion.result.err().map(|error| error.kind);
        self.collect().into_iter().map(kind).collect()
    }
}

#[test]
fn conforms() {
    let Some(mock) = Mock::new() else { return };
    let config = SpdkConfig { command_timeout: Duration::from_secs(10), ..mock.config.clone() };
    let mut open = || -> Box<dyn IoEngine> { Box::new(SpdkEngine::open(&config).expect("open")) };
    conformance(&mut open, &Conformance { requests: 800, ..Conformance::default() });
    mock.check();
    assert!(mock.get("mock_flushes") > 0);
    eprintln!("requests that the mock had no room for: {}", mock.get("mock_out_of_memory"));
}

#[test]
fn more_commands_than_spdk_has_room_for_wait() {
    let Some(mock) = Mock::new() else { return };
    let mut rig = mock.open();
    let before = mock.get("mock_out_of_memory");
    (0..128).for_each(|id| rig.read(id));
    assert!(rig.collect().iter().all(|completion| completion.result.is_ok()));
    assert!(mock.get("mock_out_of_memory") > before, "the mock's 40 places were full");
    mock.close(rig);
}

#[test]
fn a_bad_block_is_a_media_error() {
    let Some(mock) = Mock::new() else { return };
    let mut rig = mock.open();
    mock.set("mock_bad_lba", 20);
    let mut expected = vec![None; 8];
    expected[2] = Some(IoErrorKind::Media);
    assert_eq!(rig.eight_reads(), expected);
    let buffer = Buffer::Pages(PageBuffer::zeroed(256 << 10));
    rig.engine
        .submit(Request { id: 1, operation: Operation::Read, file: 0, offset: 0, buffer })
        .expect("room");
    let error = rig.collect().remove(0).result.expect_err("bad");
    let text = "spdk: read 262144 bytes at 0x0 of file 0: unrecovered read error (status type 2, code 0x81)";
    assert_eq!(error.to_string(), text);
    assert_eq!(rig.engine.resets(), 0);
    mock.close(rig);
}

#[test]
fn lost_commands_and_failed_queue_pairs_end_in_a_reset() {
    let Some(mock) = Mock::new() else { return };
    let mut rig = mock.open();
    mock.set("mock_lose", 1);
    assert_eq!(rig.eight_reads(), [Some(IoErrorKind::Device); 8]);
    assert_eq!(rig.engine.sync(0).expect_err("lost").kind, IoErrorKind::Device);
    mock.set("mock_lose", 0);
    assert_eq!(rig.eight_reads(), [None; 8]);
    mock.set("mock_completions_errno", -6);
    assert_eq!(rig.eight_reads(), [Some(IoErrorKind::Device); 8]);
    assert_eq!(rig.eight_reads(), [None; 8]);
    rig.engine.sync(0).expect("nothing was written");
    let buffer = Buffer::Pages(PageBuffer::zeroed(4096));
    rig.engine
        .submit(Request { id: 1, operation: Operation::Write, file: 0, offset: 0, buffer })
        .expect("room");
    assert_eq!(rig.collect().remove(0).result, Ok(()));
    mock.set("mock_completions_errno", -6);
    assert_eq!(rig.eight_reads(), [Some(IoErrorKind::Device); 8]);
    assert!(rig.engine.sync(0).expect_err("the write may be lost").reason.contains("may be lost"));
    rig.engine.sync(0).expect("once");
    assert_eq!((rig.engine.resets(), mock.get("mock_resets")), (4, 4));
    mock.close(rig);
}

#[test]
fn a_device_that_cannot_be_reset_is_dead_and_keeps_the_memory_it_may_still_access() {
    let Some(mock) = Mock::new() else { return };
    let mut rig = mock.open();
    mock.set("mock_completions_errno", -6);
    mock.set("mock_reset_fails", 1);
    let buffer = Buffer::Pages(PageBuffer::zeroed(4096));
    rig.engine
        .submit(Request { id: 9, operation: Operation::Read, file: 0, offset: 0, buffer })
        .expect("room");
    for round in 0..2 {
        let mut kinds = rig.eight_reads();
        assert_eq!(kinds.len(), if round == 0 { 9 } else { 8 });
        kinds.retain(|kind| *kind != Some(IoErrorKind::Device));
        assert_eq!(kinds, []);
        assert_eq!(rig.engine.abandoned_commands(), 9, "none when nothing reaches the device");
        assert_eq!(rig.slots.used_count(), 8, "handed back, and never reused");
    }
    assert_eq!(rig.engine.sync(0).expect_err("dead").kind, IoErrorKind::Device);
    let Rig { engine, slots } = rig;
    let slab = Arc::downgrade(slots.slab());
    drop((engine, slots));
    assert!(slab.upgrade().is_some(), "the slab is not freed under the device");
    assert_eq!(mock.call("mock_memories"), 1, "the bounce buffers are left, the slab is unregistered");
    assert_eq!(mock.call("mock_late_accesses"), 9);
    mock.check();
}

#[test]
fn wait_hands_over_what_is_queued() {
    let Some(mock) = Mock::new() else { return };
    let mut rig = mock.open();
    rig.read(1);
    let (waker, started, mut completions) = (rig.engine.waker(), Instant::now(), Vec::new());
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _ = is_done.recv_timeout(Duration::from_secs(10));
            waker.wake();
        });
        while rig.engine.poll(1, &mut completions) == 0 && started.elapsed() < Duration::from_secs(5) {
            rig.engine.wait(None).expect("wait");
        }
        drop(done);
    });
    assert_eq!(completions.len(), 1, "nobody called `flush`, and `wait` slept until it was woken");
    drop(completions);
    mock.close(rig);
}

#[test]
fn a_flush_that_a_reset_ends_says_once_more_that_writes_may_be_lost() {
    let Some(mock) = Mock::new() else { return };
    let mut rig = mock.open();
    let buffer = Buffer::Pages(PageBuffer::zeroed(4096));
    rig.engine
        .submit(Request { id: 1, operation: Operation::Write, file: 0, offset: 0, buffer })
        .expect("room");
    assert_eq!(rig.collect().remove(0).result, Ok(()));
    mock.set("mock_lose", 1);
    assert_eq!(rig.engine.sync(0).expect_err("lost").kind, IoErrorKind::Device);
    mock.set("mock_lose", 0);
    assert!(rig.engine.sync(0).expect_err("the write may be lost").reason.contains("may be lost"));
    rig.engine.sync(0).expect("once");
    mock.close(rig);
}

#[test]
fn the_first_bytes_are_those_of_the_device() {
    let Some(mock) = Mock::new() else { return };
    std::fs::write(&mock.file, vec![0xA5; FILE_BYTES as usize]).expect("contents");
    let mut rig = mock.open();
    assert!(rig.engine.first_bytes(100_001).expect("read") == vec![0xA5; 100_001]);
    mock.close(rig);
}

#[test]
fn what_cannot_be_opened_or_registered_says_why() {
    let missing = SpdkConfig {
        libraries: vec![PathBuf::from("/nonexistent/libspdk_nvme.so")],
        ..SpdkConfig::new("trtype:PCIe traddr:0000:01:00.0")
    };
    let error = SpdkEngine::open(&missing).map(drop).expect_err("no library");
    assert!(
        matches!(error, NvmeError::Library { .. }) && error.kind() == IoErrorKind::Unsupported,
        "{error}"
    );
    assert!(error.to_string().contains("/nonexistent/libspdk_nvme.so"), "{error}");

    let Some(mock) = Mock::new() else { return };
    for (change, words) in [
        (
            SpdkConfig { transport: "nonsense".to_owned(), ..mock.config.clone() },
            "spdk_nvme_transport_id_parse",
        ),
        (
            SpdkConfig { transport: "trtype:PCIe traddr:/nonexistent".to_owned(), ..mock.config.clone() },
            "connect",
        ),
        (SpdkConfig { namespace: 2, ..mock.config.clone() }, "namespace 2 is not active"),
        (SpdkConfig { requests_max: 0, ..mock.config.clone() }, "requests_max"),
    ] {
        let error = SpdkEngine::open(&change).map(drop).expect_err(words);
        assert!(error.to_string().contains(words), "{error}");
    }
    mock.check();

    mock.set("mock_register_errno", -22);
    let mut engine = SpdkEngine::open(&mock.config).expect("open");
    let layout = SlabLayout { slot_bytes: 4096, slot_count: 1 };
    let slots = SlotPool::new(Arc::new(Slab::create("s", layout, PageSize::Standard).expect("slab")));
    let error = engine.register(slots.slab()).expect_err("refused");
    assert!(error.kind == IoErrorKind::Unmapped && error.reason.contains("2 MiB"), "{error}");
    // SPDK says that it has registered memory which it could not map.
    mock.set("mock_register_errno", 0);
    mock.set("mock_unmapped", 1);
    let error = engine.register(slots.slab()).expect_err("unmapped");
    assert!(error.kind == IoErrorKind::Unmapped && error.reason.contains("spdk_vtophys"), "{error}");
    let buffer = Buffer::Slot { slot: slots.acquire().expect("slot"), offset: 0, len: 4096 };
    engine.submit(Request { id: 1, operation: Operation::Read, file: 0, offset: 0, buffer }).expect("room");
    let mut completions = Vec::new();
    assert_eq!(engine.poll(1, &mut completions), 1);
    assert_eq!(completions[0].result.as_ref().expect_err("unmapped").kind, IoErrorKind::Unmapped);
    drop(engine);
    mock.check();
}

/// Runs a test of this binary in a separate process, in which SPDK is loaded for the first time.
fn in_a_process(test: &str, part: &str, library_path: Option<&Path>) -> std::process::ExitStatus {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(PART, part);
    if let Some(path) = library_path {
        command.env("LD_LIBRARY_PATH", path);
    }
    let mut child = command.spawn().expect("starts");
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(status) = child.try_wait().expect("waits") {
            return status;
        }
        if Instant::now() > deadline {
            let _ended = child.kill();
            let _reaped = child.wait();
            panic!("{test}, {part}: still running after 30 s");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Environment variable that names the part of a test which a process of [`in_a_process`] carries out.
const PART: &str = "KVSTORE_SPDK_TEST_PART";

fn part() -> Option<String> {
    std::env::var(PART).ok()
}

/// Maps a file that ends before the mapping: an access is a bus error.
fn behind_the_end() -> *mut u8 {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("spdk-short-{}", std::process::id()));
    let file = std::fs::File::create_new(&path).expect("file");
    std::fs::remove_file(&path).expect("its name");
    let flags = (libc::PROT_READ, libc::MAP_PRIVATE);
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
    // SAFETY: a mapping of its own.
    let mapped = unsafe { libc::mmap(std::ptr::null_mut(), 4096, flags.0, flags.1, descriptor, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.cast()
}

#[test]
fn bus_errors_end_the_process_as_before_but_those_of_a_device_that_was_pulled_out() {
    use std::os::unix::process::ExitStatusExt;
    const NAME: &str = "bus_errors_end_the_process_as_before_but_those_of_a_device_that_was_pulled_out";
    let Some(part) = part() else {
        if library().is_some() {
            assert_eq!(in_a_process(NAME, "a file", None).signal(), Some(libc::SIGBUS));
            assert_eq!(in_a_process(NAME, "a signal", None).signal(), Some(libc::SIGBUS));
            assert!(in_a_process(NAME, "registers", None).success());
        }
        return;
    };
    let library = library().expect("compiled before");
    let config = SpdkConfig { libraries: vec![library.to_owned()], ..SpdkConfig::new("nonsense") };
    assert!(SpdkEngine::open(&config).is_err(), "loaded, and there is no such device");
    let place = behind_the_end();
    match part.as_str() {
        // SAFETY: asks the kernel to deliver a signal.
        "a signal" => assert_eq!(unsafe { libc::kill(std::process::id() as i32, libc::SIGBUS) }, 0),
        "registers" => {
            // SAFETY: the library is loaded already.
            let loaded = unsafe { libloading::Library::new(library) }.expect("the mock loads");
            // SAFETY: an `int64_t` of the mock's.
            let registers = unsafe { loaded.get::<*mut i64>(b"mock_registers") }.expect("there");
            // SAFETY: as above.
            unsafe { registers.write(place.expose_provenance() as i64) };
        }
        _ => {}
    }
    // SAFETY: mapped; the kernel answers with SIGBUS, unless other memory comes in its place.
    let byte = unsafe { place.read_volatile() };
    assert_eq!((part.as_str(), byte), ("registers", 0), "a bus error passed");
}

#[test]
fn the_thread_that_opens_an_engine_keeps_its_cores() {
    let Some(mock) = Mock::new() else { return };
    if part().is_none() {
        drop(mock);
        let status = in_a_process("the_thread_that_opens_an_engine_keeps_its_cores", "cores", None);
        return assert!(status.success());
    }
    let before = rustix::thread::sched_getaffinity(None).expect("cores");
    if before.count() == 1 {
        eprintln!("SKIPPED: this machine has one core");
    }
    drop(SpdkEngine::open(&mock.config).expect("open"));
    let cores = || rustix::thread::sched_getaffinity(None).expect("cores");
    assert!(cores() == before && std::thread::spawn(cores).join().expect("ends") == before);
    mock.check();
}

#[test]
fn spdks_libraries_come_after_those_that_they_are_not_linked_with() {
    const NAME: &str = "spdks_libraries_come_after_those_that_they_are_not_linked_with";
    let Some(part) = part() else {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("spdk-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("folder");
        let (needed, nothing) = (folder.join("needed.c"), folder.join("nothing.c"));
        std::fs::write(&needed, "int mock_needed;\n").expect("source");
        std::fs::write(&nothing, "extern int nothing;\n").expect("source");
        let is_compiled = compile(&mock_source(), &folder.join("libspdk_env_dpdk.so"), &["-DMOCK_NEEDS"])
            && compile(&nothing, &folder.join("libspdk_nvme.so"), &[]);
        if is_compiled {
            assert!(in_a_process(NAME, "missing", Some(&folder)).success());
            // As on a machine without development files.
            compile(&needed, &folder.join("librte_eal.so.23"), &[]);
            for name in ["librte_mempool", "librte_mempool_ring", "librte_bus_pci"] {
                compile(&nothing, &folder.join(format!("{name}.so.23")), &[]);
            }
            assert!(in_a_process(NAME, "there", Some(&folder)).success());
        }
        return std::fs::remove_dir_all(&folder).expect("removed");
    };
    let error = SpdkEngine::open(&SpdkConfig::new("nonsense")).map(drop).expect_err("no device").to_string();
    let words = if part == "there" {
        vec!["spdk_nvme_transport_id_parse"]
    } else {
        vec!["libspdk_env_dpdk.so", "mock_needed", "before it", "librte_eal"]
    };
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}
