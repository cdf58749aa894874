//! `kvasir completions` and `kvasir man`: documents that are generated from the command line's declaration.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap_complete::Shell;

const NAME: &str = "kvasir";

/// Prints the completion script of a shell.
pub(crate) fn completions(mut command: clap::Command, shell: Shell) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, NAME, &mut script);
    print(&script)
}

/// Prints the manual page, or writes the pages of all commands into a folder.
pub(crate) fn pages(command: clap::Command, folder: Option<&Path>) -> Result<ExitCode> {
    match folder {
        Some(folder) => {
            clap_mangen::generate_to(command, folder)
                .with_context(|| format!("the manual pages in {}", folder.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page).context("the manual page")?;
            print(&page)
        }
    }
}

/// Prints a document. A reader that closes the pipe early, as `head` does, is not an error.
fn print(document: &[u8]) -> Result<ExitCode> {
    match std::io::stdout().lock().write_all(document) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error).context("stdout"),
        _ => Ok(ExitCode::SUCCESS),
    }
}
