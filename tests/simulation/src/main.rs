//! The whole system on a simulated kernel.

mod kernel;

use std::time::{Duration, Instant};

use kernel::{KernelConfig, report};

fn main() {
    let seed = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(1);
    let began = Instant::now();
    report::to(1);
    let prints_trace = std::env::args().nth(2).is_some();
    kernel::begin(&KernelConfig { seed, prints_trace });
    let server = kernel::add_host("server");
    let address = kernel::host_address(server);
    kernel::start_process(server, "server", move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let listener = tokio::net::TcpListener::bind("0.0.0.0:80").await.expect("bind");
            loop {
                let (mut stream, _) = listener.accept().await.expect("accept");
                tokio::spawn(async move {
                    let mut bytes = [0; 100];
                    while let Ok(count) = stream.read(&mut bytes).await {
                        if count == 0 {
                            break;
                        }
                        tokio::time::sleep(Duration::from_millis(500)).await;
                        stream.write_all(&bytes[..count]).await.expect("write");
                    }
                });
            }
        });
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        tokio::time::sleep(Duration::from_millis(5)).await;
        let work = (0..10).map(|client| {
            tokio::spawn(async move {
                let mut stream = tokio::net::TcpStream::connect((address, 80)).await.expect("connect");
                for round in 0..100_u8 {
                    stream.write_all(&[client, round]).await.expect("write");
                    let mut bytes = [0; 2];
                    stream.read_exact(&mut bytes).await.expect("read");
                    assert_eq!(bytes, [client, round]);
                }
            })
        });
        for task in work.collect::<Vec<_>>() {
            task.await.expect("a client");
        }
    });
    let (hash, steps, turns) = kernel::trace();
    report::send(&format!("hash {hash:x} steps {steps} turns {turns} simulated {:?}", began.elapsed()));
    report::end(0);
}
