//! The wheel in a clean environment: `pip install` of that one file is all that a user needs to open a store. Skips loudly without
//! Python, its module for environments, or binutils.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SCRIPT: &str = "
from importlib.metadata import entry_points, version
from kvasir_kv.library import Library, Store
library = Library()
assert 'site-packages' in library.path, library.path
assert '.'.join(map(str, library.version())) == version('kvasir-kv'), library.version()
with Store.open(library, '[host_tier]\\ncapacity = \"1 MiB\"\\n') as store:
    assert store.statistics()['bytes_max'] > 0
(plugin,) = [one for one in entry_points(group='vllm.general_plugins') if one.name == 'kvasir_kv']
assert callable(plugin.load())
print('opened')
";

fn ran(command: &mut Command) -> Result<Output, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let told = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(output) } else { Err(format!("{command:?}: {told}")) }
}

#[test]
fn pip_installs_all_that_is_needed() {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("wheel-{}", std::process::id()));
    let environment = folder.join("environment");
    let new_enough = "import sys; sys.exit(sys.version_info < (3, 10))";
    let wanted = [
        ran(Command::new(&python).args(["-c", new_enough])),
        ran(Command::new("readelf").arg("--version")),
        ran(Command::new(&python).args(["-m", "venv"]).arg(&environment)),
    ];
    if let Some(reason) = wanted.into_iter().find_map(Result::err) {
        eprintln!("SKIPPED the test of the wheel: {reason}");
        let _absent = std::fs::remove_dir_all(&folder);
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/build_wheel.py");
    let build = |out: &str| {
        let out = folder.join(out);
        let mut command = Command::new(&python);
        let built = command.arg(&script).arg("--library").arg(library()).arg("--out").arg(out);
        let output = ran(built).expect("a wheel");
        PathBuf::from(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let (wheel, again) = (build("one"), build("two"));
    let read = |path: &PathBuf| std::fs::read(path).expect("the wheel");
    assert!(read(&wheel) == read(&again), "two builds differ");
    let pip = environment.join("bin/pip");
    ran(Command::new(pip).args(["install", "--quiet", "--no-index"]).arg(&wheel)).expect("installs");
    let installed = environment.join("bin/python");
    let mut command = Command::new(installed);
    // Nothing of this checkout is used: no environment variables, and another folder.
    let opened = ran(command.args(["-I", "-c", SCRIPT]).env_remove("KVASIR_KV_LIBRARY").current_dir(&folder));
    assert_eq!(opened.map(|output| output.stdout), Ok(b"opened\n".to_vec()));
    std::fs::remove_dir_all(&folder).expect("removed");
}

/// Cargo puts the shared library two folders above the test's own, and one above when it is only a dependency.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a path");
    (test.ancestors().skip(1).take(2).map(|folder: &Path| folder.join("libkvasir_kv.so")))
        .find(|library| library.exists())
        .expect("cargo has built libkvasir_kv.so")
}
