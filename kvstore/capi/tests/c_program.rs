//! A C program against the header and the library, under valgrind where there is one. Skips loudly without a compiler.

use std::path::PathBuf;
use std::process::Command;

#[test]
fn a_c_program_does_all_of_it() {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    if !Command::new(&compiler).arg("--version").output().is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED the C test: no compiler `{compiler}`");
        return;
    }
    let crate_folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let test = std::env::current_exe().expect("a path");
    // Cargo puts the shared library two folders above the test's own, or one above if it is only a dependency.
    let library = test
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("libkvasir_kv.so"))
        .find(|library| library.exists())
        .expect("cargo has built libkvasir_kv.so");
    let program = folder.join("kvasir_kv_test");
    let source = crate_folder.join("tests/kvasir_kv_test.c");
    for language in [&["-std=c99"][..], &["-std=c++11", "-x", "c++", "-fsyntax-only"]] {
        let compiled = Command::new(&compiler)
            .args(language)
            .args([
                "-Wall",
                "-Wextra",
                "-Werror",
                "-pedantic",
                "-D_POSIX_C_SOURCE=200809L",
                "-g",
                "-pthread",
                "-I",
            ])
            .arg(crate_folder.join("include"))
            .arg("-o")
            .arg(&program)
            .arg(&source)
            .args(["-x", "none"])
            .args((language.len() == 1).then_some(&library))
            .output()
            .expect("the compiler runs");
        assert!(compiled.status.success(), "{language:?}\n{}", String::from_utf8_lossy(&compiled.stderr));
    }
    // The program loads the library by the name of its ABI.
    let loaded = folder.join("loaded");
    let _there = std::fs::create_dir(&loaded);
    let name = loaded.join("libkvasir_kv.so.0");
    let _absent = std::fs::remove_file(&name);
    std::os::unix::fs::symlink(&library, &name).expect("a link");
    let linked = std::fs::read(&program).expect("the program");
    let asks_for = b"\0libkvasir_kv.so.0\0";
    assert!(linked.windows(asks_for.len()).any(|bytes| bytes == asks_for), "linked without the SONAME");
    let valgrind =
        Command::new("valgrind").arg("--version").output().is_ok_and(|output| output.status.success());
    let mut run = if valgrind {
        let mut run = Command::new("valgrind");
        run.args(["--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite"]);
        run.arg(&program);
        run
    } else {
        eprintln!("without valgrind: there is none");
        Command::new(&program)
    };
    let disk = folder.join("kvasir_kv_test_disk");
    let _absent = std::fs::remove_dir_all(&disk);
    let output = run
        .arg(folder.join("kvasir_kv_test.toml"))
        .arg(&disk)
        .env("LD_LIBRARY_PATH", &loaded)
        .output()
        .expect("the program runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("valgrind: {valgrind}\n{printed}");
    let _left = std::fs::remove_dir_all(&disk);
    assert!(output.status.success(), "{printed}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(printed.matches("ok: ").count(), 11, "{printed}");
}
