//! `kvasir key`: manages keys of clients.

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

#[derive(Subcommand)]
pub(crate) enum KeyCommand {
    /// Create a key. The key is shown once, with the lines for the keys file, which holds only its digest.
    New {
        /// Name of the key, for logs and limits.
        name: String,
        /// Tenant that the key belongs to.
        #[arg(long, default_value = "default")]
        tenant: String,
        /// Allow the key to query the gateway itself: status, metrics, decisions.
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
