//! `kvasir config check --deep`: checks the files, folders and free space that a configuration names.
//!
//! The check creates and changes nothing. A start may still fail: another process may take the space or the
//! folder in between.

use std::fs::File;
use std::path::{Path, PathBuf};

use control_config::{Bytes, Settings};
use rustix::fs::Access;

use crate::{compose, doctor, roster};

/// Returns every problem that would make a start fail, each with the key that names it.
pub(crate) fn problems(settings: &Settings) -> Vec<String> {
    let mut problems = Vec::new();
    let (access, tls) = (&settings.access, &settings.tls);
    let readable = [
        ("access.keys_file", &access.keys_file),
        ("access.jwks_file", &access.jwks_file),
        ("tls.certificate_file", &tls.certificate_file),
        ("tls.key_file", &tls.key_file),
        ("tls.client_ca_file", &tls.client_ca_file),
        ("tls.upstream_ca_file", &tls.upstream_ca_file),
        ("tls.upstream_certificate_file", &tls.upstream_certificate_file),
        ("tls.upstream_key_file", &tls.upstream_key_file),
        ("gateway.engine_key_file", &settings.gateway.engine_key_file),
        ("worker.api_key_file", &settings.worker.api_key_file),
        ("worker.certificate_file", &settings.worker.certificate_file),
        ("worker.private_key_file", &settings.worker.private_key_file),
        ("worker.client_ca_file", &settings.worker.client_ca_file),
        ("store.resp_password_file", &settings.store.resp_password_file),
    ];
    for (key, path) in readable.into_iter().filter(|(_, path)| !path.is_empty()) {
        if let Err(error) = File::open(path) {
            problems.push(format!("{key} = \"{path}\": {error}"));
        }
    }
    let written = [
        ("access.audit_file", &access.audit_file),
        ("gateway.snapshot_file", &settings.gateway.snapshot_file),
        ("database.file", &settings.database.file),
    ];
    for (key, path) in written.into_iter().filter(|(_, path)| !path.is_empty()) {
        let folder = Path::new(path).parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Err(reason) = writable(folder.unwrap_or(Path::new("."))) {
            problems.push(format!("{key} = \"{path}\": {reason}"));
        }
    }
    if let Err(error) = compose::model_config(settings) {
        problems.push(format!("engine.model_folder = \"{}\": {error:#}", settings.engine.model_folder));
    }
    if let Err(error) = roster::models(settings) {
        problems.push(format!("model_folder of [gateway] or a [[pool]]: {error:#}"));
    }
    if let Err(error) = dataplane_rails::shared_key(&settings.transfer.secret_file) {
        problems.push(error.to_string());
    }
    problems.extend(settings.disk_tier.path.0.iter().filter_map(|path| disk(settings, path)));
    problems
}

/// Checks a folder of the disk tier: it can be created and written, and has space for its share of every
/// worker of `serve`.
fn disk(settings: &Settings, path: &str) -> Option<String> {
    let tier = &settings.disk_tier;
    if tier.capacity.0 == 0 || tier.engine.starts_with("nvme") || tier.engine == "spdk" {
        return None;
    }
    let named = format!("disk_tier.path = \"{path}\"");
    let path = Path::new(path);
    if doctor::is_block_device(path) {
        let is_listed = tier.path.0.len() > 1;
        return is_listed.then(|| format!("{named}: a block device, and several paths must be folders"));
    }
    let Some(folder) = doctor::existing(path) else { return Some(format!("{named}: no such folder")) };
    if let Err(reason) = writable(&folder) {
        return Some(format!("{named}: {reason}"));
    }
    let room = match rustix::fs::statvfs(&folder) {
        Ok(room) => room,
        Err(errno) => return Some(format!("{named}: {errno}")),
    };
    let free =
        room.f_bavail.saturating_mul(room.f_frsize).saturating_add(doctor::held_on_device_of(settings, path));
    let workers = settings.serve.prefill_workers + settings.serve.decode_workers;
    let share = Bytes(doctor::bytes_on_device_of(settings, path));
    let wanted = share.0.saturating_mul(workers);
    let mib = |bytes: u64| Bytes(bytes >> 20 << 20);
    (wanted > free).then(|| {
        let free = mib(free);
        format!("{named}: {workers} workers take {share} of disk_tier.capacity each, and {free} are free")
    })
}

/// Returns an error if files cannot be created in the folder.
fn writable(folder: &Path) -> Result<(), String> {
    let shown = || PathBuf::from(folder).display().to_string();
    if !folder.is_dir() {
        return Err(format!("there is no folder {}", shown()));
    }
    rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|errno| format!("files cannot be made in {}: {errno}", shown()))
}

#[cfg(test)]
mod tests {
    use control_config::Paths;

    use super::*;

    #[test]
    fn missing_files_and_room_are_named_by_their_keys() {
        assert_eq!(problems(&Settings::default()), Vec::<String>::new());
        let mut settings = Settings::default();
        settings.access.keys_file = "/nonexistent/keys".to_owned();
        settings.tls.certificate_file = "/nonexistent/pem".to_owned();
        settings.access.audit_file = "/nonexistent/audit.jsonl".to_owned();
        settings.engine.model_folder = "/nonexistent/model".to_owned();
        settings.transfer.secret_file = "/nonexistent/secret".to_owned();
        settings.disk_tier.path = Paths(vec![std::env::temp_dir().display().to_string()]);
        settings.disk_tier.capacity = Bytes(1 << 59);
        let found = problems(&settings);
        let keys = [
            "access.keys_file = \"/nonexistent/keys\"",
            "tls.certificate_file",
            "access.audit_file",
            "engine.model_folder",
            "disk_tier.path",
            "transfer.secret_file = \"/nonexistent/secret\"",
        ];
        for key in keys {
            assert!(found.iter().any(|problem| problem.starts_with(key)), "{key}: {found:?}");
        }
        assert!(found.iter().any(|problem| problem.contains("are free")), "{found:?}");
    }
}
