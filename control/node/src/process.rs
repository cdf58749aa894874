//! Process set-up before threads are started: logging, cores, and the link to the parent process.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, Result, bail};
use control_config::{ConfigError, Settings};
use dataplane_fabric::cores::Cores;
use tracing_subscriber::EnvFilter;

use crate::{GlobalArgs, LogFormat};

const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Sets up the process and reads its settings.
pub(crate) fn start(common: &GlobalArgs) -> Result<Settings> {
    let filter = log_filter(&common.log).with_context(|| format!("--log {:?}", common.log))?;
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(!is_plain && std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    // A subscriber that is already set is kept: a simulation runs several nodes in one process.
    let _kept = match common.log_format {
        LogFormat::Text => log.try_init(),
        LogFormat::Json => log.json().try_init(),
    };
    if common.supervised {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
            .context("prctl(PR_SET_PDEATHSIG)")?;
    }
    if let Some(cores) = &common.cores {
        let bound = cores.parse::<Cores>().and_then(|cores| cores.bind_thread());
        bound.with_context(|| format!("--cores {cores:?}"))?;
    }
    Ok(read(common.config.as_deref(), common.supervised)?)
}

/// Returns the settings of a file, or the defaults.
pub(crate) fn read(path: Option<&Path>, is_supervised: bool) -> Result<Settings, ConfigError> {
    let mut settings = path.map_or_else(|| Ok(Settings::default()), control_config::load)?;
    if is_supervised {
        // Several workers of one machine share one file: each gets its own ports.
        for address in [
            &mut settings.worker.events,
            &mut settings.worker.replay,
            &mut settings.transfer.listen,
            &mut settings.rdma.listen,
        ] {
            address.set_port(0);
        }
    }
    Ok(settings)
}

/// Parses the filter of `--log`. An unknown level would be taken for a module name and silence everything
/// else, so a bare word must be a level.
fn log_filter(text: &str) -> Result<EnvFilter> {
    for directive in text.split(',').map(str::trim).filter(|directive| !directive.is_empty()) {
        let is_bare = !directive.contains(['=', '[']);
        if is_bare && !LOG_LEVELS.iter().any(|level| directive.eq_ignore_ascii_case(level)) {
            bail!("{directive:?} is not a level ({}), nor like `module=level`", LOG_LEVELS.join(", "));
        }
    }
    Ok(EnvFilter::try_new(text)?)
}

/// Returns the number of cores that this process may use.
pub(crate) fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_log_level_is_an_error() {
        for good in ["warn", "INFO", "off", "info,router_events=debug", "router_gateway=trace", ""] {
            assert!(log_filter(good).is_ok(), "{good}");
        }
        for bad in ["blah", "info,blah", "router_events=blah", "debugg"] {
            assert!(log_filter(bad).is_err(), "{bad}");
        }
        let told = log_filter("blah").expect_err("no level").to_string();
        assert!(told.contains("\"blah\" is not a level (off, error"), "{told}");
    }
}
