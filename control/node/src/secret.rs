//! Keys between a gateway and its workers, read from files or the environment, never from the configuration
//! itself. Messages name the file and the line, never a key.

use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, bail, ensure};
use control_config::Settings;
use router_engines::key::{ApiKey, EngineKeys};
use router_fleet::WorkerSpec;

use crate::compose;

/// Environment variable with the key that all engines of a gateway require.
pub(crate) const ENGINE_KEY: &str = "KVASIR_ENGINE_KEY";
/// Environment variable with the key that a worker requires.
const WORKER_KEY: &str = "KVASIR_WORKER_KEY";
const NO_KEY: &str = "a key is plain ASCII without blanks around it";

/// Returns the key that a worker's callers must present. A worker of `serve` always has one.
pub(crate) fn of_worker(settings: &Settings, is_supervised: bool) -> Result<Option<ApiKey>> {
    if let Some(path) = compose::some(&settings.worker.api_key_file) {
        let text = read("worker.api_key_file", &path)?;
        return ApiKey::new(text.trim()).with_context(|| format!("{path}: {NO_KEY}")).map(Some);
    }
    match variable(WORKER_KEY)? {
        None if is_supervised => variable(compose::PEER_KEY),
        key => Ok(key),
    }
}

/// Returns the keys that the engines of a gateway require. `given` are the workers of the command line.
pub(crate) fn of_engines(settings: &Settings, is_supervised: bool, given: &[&str]) -> Result<EngineKeys> {
    let mut keys = match compose::some(&settings.gateway.engine_key_file) {
        Some(path) => parse(&read("gateway.engine_key_file", &path)?).with_context(|| path)?,
        None => EngineKeys { all: variable(ENGINE_KEY)?, ..EngineKeys::default() },
    };
    keys.trusts_added = compose::is_closed(settings);
    // Workers of `serve` have the same settings and environment as this process. No other worker gets their
    // key, which also opens this gateway's restricted routes.
    if is_supervised && let Some(key) = of_worker(settings, true)? {
        keys.own.extend(given.iter().map(|url| (plain(url).to_owned(), key.clone())));
    }
    Ok(keys)
}

/// Returns the key for a worker of the configuration; a service outside the cluster gets only a key given for
/// its URL.
pub(crate) fn of_configured(keys: &EngineKeys, url: &str, is_outside: bool) -> Option<ApiKey> {
    if is_outside { keys.own_of(url).cloned() } else { keys.of(url).cloned() }
}

/// Logs the keys whose URL matches no worker of the configuration: the URL may be misspelled.
pub(crate) fn warn_of_unused(keys: &EngineKeys, workers: &[WorkerSpec]) {
    for url in keys.own.keys().filter(|url| !workers.iter().any(|worker| plain(&worker.url) == *url)) {
        tracing::warn!(url, "gateway.engine_key_file has a key for a URL that is no configured worker's");
    }
}

/// Parses lines of `KEY` or `URL KEY`; empty lines and those that begin with `#` are skipped.
fn parse(text: &str) -> Result<EngineKeys> {
    let is_url = |text: &str| text.starts_with("http://") || text.starts_with("https://");
    let mut keys = EngineKeys::default();
    for (number, line) in text.lines().enumerate() {
        let (number, line) = (number + 1, line.trim());
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (url, key) = match line.split_once(char::is_whitespace) {
            Some((url, key)) if is_url(url) => (Some(url), key.trim()),
            None if !is_url(line) => (None, line),
            _ => bail!("line {number} is neither `KEY` nor `URL KEY`"),
        };
        let key = ApiKey::new(key).with_context(|| format!("line {number}: {NO_KEY}"))?;
        let before = match url {
            Some(url) => keys.own.insert(plain(url).to_owned(), key),
            None => keys.all.replace(key),
        };
        ensure!(before.is_none(), "line {number} gives the same workers a second key");
    }
    ensure!(keys.all.is_some() || !keys.own.is_empty(), "the file contains no key");
    Ok(keys)
}

fn plain(url: &str) -> &str {
    url.trim_end_matches('/')
}

pub(crate) fn read(name: &str, path: &str) -> Result<String> {
    let found = std::fs::metadata(path).with_context(|| format!("{name} = \"{path}\""))?;
    let is_private = found.permissions().mode() & 0o007 == 0;
    ensure!(is_private, "{name} = \"{path}\" can be read by all users (chmod 600)");
    std::fs::read_to_string(path).with_context(|| format!("{name} = \"{path}\""))
}

/// Returns the key in an environment variable; `None` if it is unset or empty.
pub(crate) fn variable(name: &str) -> Result<Option<ApiKey>> {
    let Some(text) = std::env::var(name).ok().filter(|text| !text.is_empty()) else { return Ok(None) };
    ApiKey::new(&text).with_context(|| format!("{name}: {NO_KEY}")).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_gets_its_own_key_or_the_one_for_all() {
        let text = "# engines\n\nshared-key\nhttp://10.0.0.1:8000/  one-key\n  https://b:1\ttwo-key  \n";
        let keys = parse(text).expect("keys");
        let expected = |text: &str| ApiKey::new(text);
        assert_eq!(keys.of("http://10.0.0.1:8000").cloned(), expected("one-key"));
        assert_eq!(keys.of("https://b:1/").cloned(), expected("two-key"));
        assert_eq!(keys.of("http://b:1").cloned(), expected("shared-key"));
        let own = parse("http://a:1 key\n").expect("keys");
        assert_eq!(own.of("http://a:2"), None);
    }

    #[test]
    fn a_bad_key_file_is_refused_by_line_and_without_its_keys() {
        for (text, part) in [
            ("", "no key"),
            ("# none\n", "no key"),
            ("s3cret\nother\n", "line 2"),
            ("http://a:1 s3cret\nhttp://a:1/ s3cret\n", "line 2"),
            ("http://a:1\n", "line 1"),
            ("two s3cret\n", "line 1"),
        ] {
            let error = format!("{:#}", parse(text).expect_err(text));
            assert!(error.contains(part) && !error.contains("s3cret"), "{text:?}: {error}");
        }
    }
}
