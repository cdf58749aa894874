//! `kvasir config`.

use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::{ConfigCommand, SchemaFormat};

pub(crate) fn run(command: ConfigCommand) -> Result<ExitCode> {
    match command {
        ConfigCommand::Check { file } => {
            control_config::load(&file)?;
            println!("{}: no problems", file.display());
        }
        ConfigCommand::Explain { name: None } => print!("{}", control_config::markdown()),
        ConfigCommand::Explain { name: Some(name) } => match control_config::explain(&name) {
            Some(text) => print!("{text}"),
            None => bail!("there is no section or key `{name}`; `kvasir config explain` lists all"),
        },
        ConfigCommand::Schema { format } => match format {
            SchemaFormat::Json => println!("{:#}", control_config::json_schema()),
            SchemaFormat::Markdown => print!("{}", control_config::markdown()),
            SchemaFormat::Example => print!("{}", control_config::example()),
        },
    }
    Ok(ExitCode::SUCCESS)
}
