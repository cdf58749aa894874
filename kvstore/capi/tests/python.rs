//! The Python package against the library, without an engine: its tests are in `tests/python`. Skips loudly without Python.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Number of tests in `tests/python`; a lower count would mean that tests were not found.
const TESTS: usize = 112;

#[test]
fn the_python_package_keeps_its_promises() {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let new_enough = "import sys; sys.exit(sys.version_info < (3, 10))";
    if !Command::new(&python).args(["-c", new_enough]).status().is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED the Python tests: `{python}` is no Python 3.10 or later");
        return;
    }
    let crate_folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(&python)
        .args(["-B", "-W", "error", "-m", "unittest", "discover", "--start-directory"])
        .arg(crate_folder.join("tests/python"))
        .env("PYTHONPATH", crate_folder.join("python"))
        .env("KVASIR_KV_LIBRARY", library())
        .output()
        .expect("Python runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    println!("{printed}");
    assert!(output.status.success(), "{printed}");
    assert!(printed.contains(&format!("Ran {TESTS} tests")), "{printed}");
}

/// Cargo puts the shared library two folders above the test's own, and one above when it is only a dependency.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a path");
    (test.ancestors().skip(1).take(2).map(|folder: &Path| folder.join("libkvasir_kv.so")))
        .find(|library| library.exists())
        .expect("cargo has built libkvasir_kv.so")
}
