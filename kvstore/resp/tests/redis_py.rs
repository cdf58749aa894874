//! redis-py against the server. Skips loudly without Python or the package; `PYTHON` names another interpreter.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;

use kvstore_resp::testing::MemoryValues;
use kvstore_resp::{Bound, Listen, RespConfig, Server};
use tokio::sync::oneshot;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_py_is_content() {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let has_package = Command::new(&python).args(["-c", "import redis.asyncio"]).output();
    if !has_package.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED the redis-py test: `{python} -c 'import redis'` fails here (pip install redis)");
        return;
    }
    let socket = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("redis-py.sock");
    let listen = vec![Listen::Tcp((Ipv4Addr::LOCALHOST, 0).into()), Listen::Unix(socket.clone())];
    let config = RespConfig { listen, allow_flush: true, ..RespConfig::default() };
    let server = Server::bind(MemoryValues::new(256 << 20), config).await.expect("binds");
    let Some(Bound::Tcp(address)) = server.bound().into_iter().next() else { panic!("no TCP address") };
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(server.run(async { drop(stopped.await) }));
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/client/resp_client.py");
    let run = move || Command::new(python).arg(script).arg(address.to_string()).arg(socket).output();
    let output = tokio::task::spawn_blocking(run).await.expect("no panic").expect("python runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{printed}");
    assert!(output.status.success(), "{printed}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(printed.matches("ok: ").count(), 11, "{printed}");
    stop.send(()).expect("the server runs");
    serving.await.expect("stops without a panic");
}
