//! Builds the emulator with the machine's C++ compiler and talks to it. Without a compiler, tests are skipped
//! with a message.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use dataplane_kernels::{FILES, Launch, checksum};

/// Seeded random numbers (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.bits() % bound
    }

    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count.div_ceil(8)).flat_map(|_| self.bits().to_le_bytes()).take(count).collect()
    }
}

/// Returns the seed of a test: `KVASIR_SEED`, or the given one. Prints it, so that a failure can be repeated.
pub(crate) fn seed(default: u64) -> u64 {
    let seed = std::env::var("KVASIR_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    println!("seed {seed} (KVASIR_SEED)");
    seed
}

/// Returns the folder of the emulator's source, from any crate whose tests include this file.
fn folder() -> PathBuf {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let mut folders = above.map(|folder| folder.join("dataplane/kernels/tests/emulator"));
    folders.find(|folder| folder.exists()).expect("the emulator's folder")
}

/// Compiles files of the emulator, unless the same text was compiled before. `None`: the test is skipped,
/// with the reason printed.
pub(crate) fn build(name: &str, files: &[&str], options: &[&str]) -> Option<PathBuf> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    if Command::new(&compiler).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err()
    {
        eprintln!("SKIPPED: no C++ compiler `{compiler}` (CXX), so the kernels were not run");
        return None;
    }
    let mut text = format!("{compiler} {files:?} {options:?}").into_bytes();
    for (_, source) in FILES {
        text.extend_from_slice(source.as_bytes());
    }
    for file in ["emulator.h", "emulator_api.h", "emulator.cpp", "driver.cpp"] {
        text.extend(std::fs::read(folder().join(file)).expect("the emulator's source"));
    }
    // One test of this process compiles while the others wait. Of several processes, the last one's file
    // stays.
    static COMPILING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _guard = COMPILING.lock();
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let target = directory.join(format!("{name}-{:016x}", checksum(&text)));
    if target.exists() {
        return Some(target);
    }
    let unfinished = directory.join(format!("{name}-{}", std::process::id()));
    let common = ["-std=c++17", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"];
    let output = Command::new(&compiler)
        .current_dir(folder())
        .args(common)
        .arg("-fno-strict-aliasing")
        .args(options)
        .args(files)
        .arg("-o")
        .arg(&unfinished)
        .output()
        .expect("the compiler runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&unfinished, &target).expect("the compiled emulator");
    Some(target)
}

/// Device memory of a test: regions at distant addresses.
#[derive(Default)]
pub(crate) struct Memory {
    regions: Vec<(u64, Vec<u8>)>,
}

impl Memory {
    /// Places bytes at an address with this remainder modulo 256.
    pub(crate) fn put(&mut self, bytes: Vec<u8>, remainder: u64) -> u64 {
        let after =
            self.regions.last().map_or(0x7f12_0000_0000, |(address, bytes)| address + bytes.len() as u64);
        let address = (after + (5 << 30)).next_multiple_of(256) + remainder;
        self.regions.push((address, bytes));
        address
    }

    /// Places numbers in memory.
    pub(crate) fn put_words(&mut self, words: &[u64]) -> u64 {
        self.put(words.iter().flat_map(|word| word.to_le_bytes()).collect(), 0)
    }

    /// Returns the bytes of a region.
    pub(crate) fn at(&self, address: u64) -> &[u8] {
        &self.regions.iter().find(|(start, _)| *start == address).expect("a region").1
    }

    pub(crate) fn at_mut(&mut self, address: u64) -> &mut Vec<u8> {
        &mut self.regions.iter_mut().find(|(start, _)| *start == address).expect("a region").1
    }

    pub(crate) fn words(&self, address: u64) -> Vec<u64> {
        self.at(address).as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
    }
}

/// A running emulator.
pub(crate) struct Emulator {
    child: Child,
}

impl Emulator {
    /// Starts the emulator with sanitizers. `None`: the test is skipped, with the reason printed.
    pub(crate) fn start() -> Option<Self> {
        let sanitized = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
        let driver = build("driver", &["driver.cpp", "emulator.cpp"], &sanitized)?;
        let mut command = Command::new(driver);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Some(Self { child: command.spawn().expect("the emulator starts") })
    }

    /// Runs a launch on the memory. The seed `order` decides how threads and thread blocks take turns.
    pub(crate) fn run(&mut self, launch: &Launch, memory: &mut Memory, order: u64) {
        let mut request = Vec::new();
        let number = |bytes: &mut Vec<u8>, number: u64| bytes.extend_from_slice(&number.to_le_bytes());
        number(&mut request, order);
        number(&mut request, launch.function.len() as u64);
        request.extend_from_slice(launch.function.as_bytes());
        for dimension in launch.grid.into_iter().chain(launch.block) {
            number(&mut request, dimension.into());
        }
        number(&mut request, launch.parameters.as_bytes().len() as u64);
        request.extend_from_slice(launch.parameters.as_bytes());
        number(&mut request, memory.regions.len() as u64);
        for (address, bytes) in &memory.regions {
            number(&mut request, *address);
            number(&mut request, bytes.len() as u64);
            request.extend_from_slice(bytes);
        }
        let input = self.child.stdin.as_mut().expect("piped");
        input.write_all(&request).and_then(|()| input.flush()).expect("the emulator reads");
        let output = self.child.stdout.as_mut().expect("piped");
        let mut answer = [0; 16];
        output.read_exact(&mut answer).expect("no sanitizer stopped the emulator (see its words above)");
        let result = u64::from_le_bytes(answer[..8].try_into().expect("eight bytes"));
        assert_eq!(result, 0, "{}: 1 unknown function, 2 bad launch, 3 deadlock", launch.function);
        for (_, bytes) in &mut memory.regions {
            output.read_exact(bytes).expect("the regions");
        }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
