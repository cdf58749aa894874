//! `kvasir key`: keys of clients.

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

#[derive(Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a key: shown once, and the lines for the keys file, which holds its digest alone.
    New {
        /// Name of the key, for logs and limits.
        name: String,
        /// Whose it is.
        #[arg(long, default_value = "default")]
        tenant: String,
        /// It may ask about the gateway itself: status, metrics, decisions.
        #[arg(long)]
        admin: bool,
    },
}

pub(crate) fn run(command: &KeyCommand) -> Result<ExitCode> {
    let KeyCommand::New { name, tenant, admin } = command;
    let key = router_access::new_key(name, tenant)?;
    eprintln!("The key, shown this once:");
    println!("{}", key.secret);
    let admin = if *admin { "admin = true\n" } else { "" };
    eprintln!("\nFor the keys file (`access.keys_file`):\n\n{}{admin}", key.lines);
    Ok(ExitCode::SUCCESS)
}
