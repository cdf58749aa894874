//! An image of a model's weights that outlives the process: mapped by the next one, and shared by all workers of a machine.
//!
//! The image is a safetensors file of the weights in their computed form (f32, fused), so that nothing is converted or
//! copied when a worker starts. Below `/dev/shm` it is shared memory. Its metadata identifies the source files; when one of
//! them has changed, the image is written again. An image is written to a temporary file and renamed, so that it is whole or
//! absent; it is never changed afterwards, and only one that this user owns and that is writable by no other user is mapped.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::ops::{Deref, Range};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::ModelConfig;
use super::weights::{Source, Tensor, Weights};
use crate::EngineError;

/// Version of the format: the set of fused tensors and their layout.
const FORMAT: u32 = 1;
/// Keys in the metadata.
const KEY: &str = "kvasir.source";
const FINGERPRINT: &str = "kvasir.fingerprint";

/// A tensor within a mapped image.
#[derive(Debug)]
pub(super) struct MappedTensor {
    image: Arc<Mmap>,
    bytes: Range<usize>,
}

impl Deref for MappedTensor {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // Alignment and bounds were checked when the tensor was created.
        bytemuck::cast_slice(&self.image[self.bytes.clone()])
    }
}

/// Key of a model folder's files: names, sizes, inodes and times of the last change.
pub(super) fn key(folder: &Path) -> Result<String, EngineError> {
    let failed = |error: std::io::Error| EngineError::file(folder, error);
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") || name == "config.json" || name == "model.safetensors.index.json" {
            // For a link, as in a hub's cache, the metadata of its target.
            let found = fs::metadata(entry.path()).map_err(failed)?;
            files.push(format!(
                "{name}:{}:{}:{}.{}",
                found.size(),
                found.ino(),
                found.mtime(),
                found.mtime_nsec()
            ));
        }
    }
    files.sort();
    Ok(format!("{FORMAT};{}", files.join(";")))
}

/// Maps an image and reads the fingerprint of its weights. The error says why it is not an image of this model.
pub(super) fn open(path: &Path, key: &str, config: &ModelConfig) -> Result<(Weights, u64), String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let found = file.metadata().map_err(|error| error.to_string())?;
    if found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o022 != 0 {
        return Err("another user may write it".to_owned());
    }
    // SAFETY: the file is this user's own and not writable by other users, and no process of this program changes or truncates an
    // image after its rename: a new one is another file.
    let image = unsafe { Mmap::map(&file) }.map_err(|error| error.to_string())?;
    let image = Arc::new(image);
    let (_, metadata) = SafeTensors::read_metadata(&image).map_err(|error| error.to_string())?;
    let told = |name: &str| metadata.metadata().as_ref().and_then(|told| told.get(name));
    if told(KEY).map(String::as_str) != Some(key) {
        return Err("it was made of other files".to_owned());
    }
    let fingerprint = told(FINGERPRINT).and_then(|text| text.parse().ok()).ok_or("it has no fingerprint")?;
    let tensors = SafeTensors::deserialize(&image).map_err(|error| error.to_string())?;
    let weights = Weights::build(config, &mut Image { image: Arc::clone(&image), tensors });
    weights.map(|weights| (weights, fingerprint)).map_err(|error| error.to_string())
}

/// Writes an image.
pub(super) fn write(path: &Path, key: &str, weights: &Weights, fingerprint: u64) -> Result<(), String> {
    let mut tensors = Vec::new();
    let mut problem = None;
    weights.for_each_tensor(|name, tensor| {
        let bytes: &[u8] = bytemuck::cast_slice(tensor);
        match TensorView::new(Dtype::F32, vec![tensor.len()], bytes) {
            Ok(view) => tensors.push((name, view)),
            Err(error) => problem = Some(error.to_string()),
        }
    });
    if let Some(problem) = problem {
        return Err(problem);
    }
    let metadata =
        HashMap::from([(KEY.to_owned(), key.to_owned()), (FINGERPRINT.to_owned(), fingerprint.to_string())]);
    // Unique to this process: workers that start together do not write to each other's file.
    let new = path.with_extension(format!("{}.new", std::process::id()));
    let written = create(path, &new)
        .and_then(|()| {
            safetensors::serialize_to_file(tensors, Some(metadata), &new).map_err(|error| error.to_string())
        })
        .and_then(|()| fs::rename(&new, path).map_err(|error| error.to_string()));
    if written.is_err() {
        // The file may not exist.
        let _gone = fs::remove_file(&new);
    }
    written
}

/// Creates the folder and the empty file, which is writable by this user only.
fn create(path: &Path, new: &Path) -> Result<(), String> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|error| error.to_string())?;
    // Left by an earlier process with this number; a planted link is not followed.
    let _gone = fs::remove_file(new);
    let created = OpenOptions::new().write(true).create_new(true).mode(0o644).open(new);
    created.map(drop).map_err(|error| error.to_string())
}

/// An image as a source of tensors.
struct Image<'a> {
    image: Arc<Mmap>,
    tensors: SafeTensors<'a>,
}

impl Source for Image<'_> {
    fn tensor(&mut self, name: &str, _: &[usize]) -> Result<Vec<f32>, EngineError> {
        Err(EngineError::Weights(format!("an image has no tensor {name} by itself")))
    }

    fn stacked(&mut self, name: &str, parts: &[(String, Vec<usize>)]) -> Result<Tensor, EngineError> {
        let wrong = |problem: &str| EngineError::Weights(format!("{name} of the image {problem}"));
        let tensor = self.tensors.tensor(name).map_err(|_| wrong("is missing"))?;
        let count: usize = parts.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        let data = tensor.data();
        if tensor.dtype() != Dtype::F32
            || bytemuck::try_cast_slice::<u8, f32>(data).map(<[f32]>::len) != Ok(count)
        {
            return Err(wrong("has another form"));
        }
        let from = data.as_ptr() as usize - self.image.as_ptr() as usize;
        Ok(Tensor::Mapped(MappedTensor { image: Arc::clone(&self.image), bytes: from..from + data.len() }))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use crate::model::Model;

    fn fixture() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/golden/llama")
    }

    /// A copy of the model whose files can be changed.
    fn copied(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kvasir-image-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        for entry in std::fs::read_dir(fixture()).expect("the fixture") {
            let path = entry.expect("a file").path();
            std::fs::copy(&path, folder.join(path.file_name().expect("a name"))).expect("copied");
        }
        folder
    }

    #[test]
    fn an_image_is_the_same_model_and_is_made_anew_when_the_model_changes() {
        let folder = copied("model");
        let image = folder.join("images/model.weights");
        let load = || Model::from_folder_and_image(&folder, &image).expect("the model");
        let plain = Model::from_folder(&folder).expect("the model");
        let (first, was_mapped) = load();
        assert!(!was_mapped && first.fingerprint() == plain.fingerprint());
        let (second, was_mapped) = load();
        assert!(was_mapped && second.fingerprint() == plain.fingerprint());
        // A mapped model continues when its image is replaced.
        let config = folder.join("config.json");
        let text = std::fs::read_to_string(&config).expect("read");
        std::fs::write(&config, format!("{text}\n")).expect("written");
        assert!(!load().1, "a file of the model has changed");
        assert!(load().1);
        std::fs::write(&image, b"nonsense").expect("written");
        assert!(!load().1, "it is no image");
        let bytes = std::fs::read(&image).expect("read");
        std::fs::write(&image, &bytes[..bytes.len() / 2]).expect("written");
        assert!(!load().1, "it is torn");
        let open_to_all = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        std::fs::set_permissions(&image, open_to_all).expect("set");
        assert!(!load().1, "others may write it");
        let left: Vec<_> = std::fs::read_dir(folder.join("images")).expect("read").collect();
        assert_eq!(left.len(), 1, "{left:?}");
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
