//! The server over a store in memory, for measurements: `resp_server [PORT [BYTES_MAX [SOCKET]]]`. Prints its
//! addresses and stops when its standard input ends.

use std::io::{Read, Write};
use std::net::Ipv4Addr;

use kvstore_resp::testing::MemoryValues;
use kvstore_resp::{Listen, RespConfig, Server};

/// The allocator of the product.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let port = arguments.next().map_or(Ok(0), |port| port.parse())?;
    let bytes_max = arguments.next().map_or(Ok(1 << 30), |bytes| bytes.parse())?;
    let mut listen = vec![Listen::Tcp((Ipv4Addr::LOCALHOST, port).into())];
    listen.extend(arguments.next().map(|path| Listen::Unix(path.into())));
    let config = RespConfig { listen, allow_flush: true, ..RespConfig::default() };
    let server = Server::bind(MemoryValues::new(bytes_max), config).await?;
    println!("{:?}", server.bound());
    std::io::stdout().flush()?;
    // The end of the input, or an error of it, ends the server.
    let input = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    server.run(async { drop(input.await) }).await;
    Ok(())
}
