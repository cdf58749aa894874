//! The official `openai` Python client against a running cluster. Skips loudly without Python or the package.

use std::path::PathBuf;
use std::process::Command;

use crate::support::{Cluster, MODEL};

#[test]
fn the_official_python_client_is_content() {
    let has_package = Command::new("python3").args(["-c", "import openai"]).output();
    if !has_package.is_ok_and(|output| output.status.success()) {
        eprintln!(
            "SKIPPED the OpenAI client test: `python3 -c 'import openai'` fails here (pip install openai)"
        );
        return;
    }
    let cluster =
        Cluster::start("client", &["prefill", "decode"], "[router]\ndisaggregate_above_tokens = 100\n");
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/client/openai_client.py");
    let url = format!("{}/v1", cluster.gateway.url());
    let output = Command::new("python3").arg(script).args([&url, MODEL]).output().expect("python3 runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{printed}");
    assert!(output.status.success(), "{printed}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(printed.matches("ok: ").count() >= 12, "{printed}");
}
