//! `kvasir config`: checks and explains the configuration.

use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::{ConfigCommand, SchemaFormat, deep_check};

pub(crate) fn run(command: ConfigCommand) -> Result<ExitCode> {
    match command {
        ConfigCommand::Check { file, deep } => {
            let settings = control_config::load(&file)?;
            let problems = if deep { deep_check::problems(&settings) } else { Vec::new() };
            if !problems.is_empty() {
                let lines = problems.iter().map(|problem| format!("{}: {problem}", file.display()));
                bail!("{}", lines.collect::<Vec<_>>().join("\n"));
            }
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
