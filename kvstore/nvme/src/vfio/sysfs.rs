//! State of a PCI function in sysfs: enough to say why it cannot be used before anything is opened.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{NvmeError, PciAddress};

/// Class 01 (mass storage), subclass 08 (non-volatile memory).
const NVME_CLASS: &str = "0x0108";
const DRIVER: &str = "vfio-pci";

/// Last component of the target of a symbolic link.
fn target(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned())
}

/// Folder of the function under `root`, which is `/sys`.
fn folder(root: &Path, address: PciAddress) -> PathBuf {
    root.join("bus/pci/devices").join(address.to_string())
}

/// Returns the function's IOMMU group, if the function exists, is an NVMe controller and is bound to vfio-pci.
pub(super) fn group(root: &Path, address: PciAddress) -> Result<String, NvmeError> {
    let folder = folder(root, address);
    let class = fs::read_to_string(folder.join("class")).map_err(|_| NvmeError::Absent { address })?;
    let class = class.trim();
    if !class.starts_with(NVME_CLASS) {
        return Err(NvmeError::NotNvme { address, class: class.to_owned() });
    }
    let Some(group) = target(&folder.join("iommu_group")) else { return Err(NvmeError::NoIommu { address }) };
    match target(&folder.join("driver")) {
        Some(driver) if driver == DRIVER => Ok(group),
        driver => Err(NvmeError::Driver { address, driver: driver.unwrap_or("no driver".to_owned()) }),
    }
}

/// Lists all functions of a group with their drivers.
pub(super) fn members(root: &Path, group: &str) -> String {
    let folder = root.join("kernel/iommu_groups").join(group).join("devices");
    let Ok(entries) = fs::read_dir(folder) else { return "unknown".to_owned() };
    let mut members: Vec<String> = entries
        .flatten()
        .map(|entry| {
            let driver = target(&entry.path().join("driver")).unwrap_or("no driver".to_owned());
            format!("{}: {driver}", entry.file_name().to_string_lossy())
        })
        .collect();
    members.sort();
    members.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn link(folder: &Path, name: &str, to: Option<&str>) {
        let path = folder.join(name);
        if path.is_symlink() {
            fs::remove_file(&path).expect("unlink");
        }
        if let Some(to) = to {
            symlink(to, path).expect("link");
        }
    }

    #[test]
    fn each_obstacle_has_its_error_and_says_what_to_do() {
        let root = std::env::temp_dir().join(format!("kvstore-nvme-sysfs-{}", std::process::id()));
        let address: PciAddress = "0000:00:04.0".parse().expect("address");
        let folder = folder(&root, address);
        let words = |expected: &str| {
            let error = group(&root, address).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        };
        words("no such PCI function");
        fs::create_dir_all(&folder).expect("folder");
        fs::write(folder.join("class"), "0x020000\n").expect("class");
        words("its PCI class is 0x020000");
        fs::write(folder.join("class"), "0x010802\n").expect("class");
        words("intel_iommu=on");
        link(&folder, "iommu_group", Some("../../kernel/iommu_groups/7"));
        words("is bound to no driver, not to vfio-pci");
        link(&folder, "driver", Some("../../../bus/pci/drivers/nvme"));
        words("is bound to nvme, not to vfio-pci");
        words("echo vfio-pci > /sys/bus/pci/devices/0000:00:04.0/driver_override");
        link(&folder, "driver", Some("../../../bus/pci/drivers/vfio-pci"));
        assert_eq!(group(&root, address), Ok("7".to_owned()));

        let devices = root.join("kernel/iommu_groups/7/devices/0000:00:05.0");
        fs::create_dir_all(&devices).expect("folder");
        link(&devices, "driver", Some("../drivers/ahci"));
        assert_eq!(members(&root, "7"), "0000:00:05.0: ahci");
        assert_eq!(members(&root, "8"), "unknown");
        fs::remove_dir_all(&root).expect("clean up");
    }
}
