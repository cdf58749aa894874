//! Loading of the embedded programs, and their maps by name.

use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray};
use aya::programs::ProgramError;
use aya::{Ebpf, EbpfLoader, Pod};

use crate::error::EbpfError;

include!(concat!(env!("OUT_DIR"), "/programs.rs"));

/// Number of lines at the end of a verifier log that are shown; they contain the reason.
const LOG_LINES_SHOWN: usize = 4;

/// Creates the maps and relocates the programs; nothing is attached yet. `sizes` overrides map capacities.
pub(crate) fn load(
    name: &'static str,
    object: Result<&[u8], &'static str>,
    sizes: &[(&'static str, u32)],
) -> Result<Ebpf, EbpfError> {
    let object = object.map_err(EbpfError::NotBuilt)?;
    let mut loader = EbpfLoader::new();
    for (map, entries) in sizes {
        loader.map_max_entries(map, *entries);
    }
    loader.load(object).map_err(|error| refused(format!("the maps of {name}"), &error))
}

/// Loads a program into the kernel, where the verifier checks it.
pub(crate) fn program<'a, P>(
    ebpf: &'a mut Ebpf,
    name: &'static str,
    load: impl FnOnce(&mut P) -> Result<(), ProgramError>,
) -> Result<&'a mut P, EbpfError>
where
    &'a mut P: TryFrom<&'a mut aya::programs::Program, Error = ProgramError>,
{
    let step = || format!("the program {name}");
    let program = ebpf.program_mut(name).ok_or_else(|| missing(name))?;
    let program: &mut P = program.try_into().map_err(|error| refused(step(), &error))?;
    load(program).map_err(|error| refused(step(), &error))?;
    Ok(program)
}

/// Takes a map out of the object, so that it is owned beside the program. It must outlive the loading of
/// every program that names it: loading looks it up by descriptor.
pub(crate) fn map<M: TryFrom<Map, Error = MapError>>(
    ebpf: &mut Ebpf,
    name: &'static str,
) -> Result<M, EbpfError> {
    let map = ebpf.take_map(name).ok_or_else(|| missing(name))?;
    map.try_into().map_err(|error| refused(format!("the map {name}"), &error))
}

/// Writes the only element of an array that from then on only the program reads.
pub(crate) fn set_once<V: Pod>(ebpf: &mut Ebpf, name: &'static str, value: V) -> Result<(), EbpfError> {
    let map = ebpf.map_mut(name).ok_or_else(|| missing(name))?;
    let mut map: Array<_, V> = map.try_into().map_err(|error| refused(format!("the map {name}"), &error))?;
    map.set(0, value, 0).map_err(|error| refused(format!("writing the map {name}"), &error))
}

/// Fills the map `ports`.
pub(crate) fn set_ports(ebpf: &mut Ebpf, ports: &[u16]) -> Result<(), EbpfError> {
    let map = ebpf.map_mut("ports").ok_or_else(|| missing("ports"))?;
    let mut map: HashMap<_, u32, u8> =
        map.try_into().map_err(|error| refused("the map ports".to_owned(), &error))?;
    for port in ports {
        map.insert(u32::from(*port), 1, 0).map_err(|error| refused(format!("port {port}"), &error))?;
    }
    Ok(())
}

/// Returns the element `index` of every CPU.
pub(crate) fn per_cpu<V: Pod>(
    map: &PerCpuArray<MapData, V>,
    index: u32,
) -> Result<aya::maps::PerCpuValues<V>, EbpfError> {
    map.get(&index, 0).map_err(|error| refused(format!("reading counter {index}"), &error))
}

/// Returns the sum of a counter over all CPUs.
pub(crate) fn counter(map: &PerCpuArray<MapData, u64>, index: u32) -> Result<u64, EbpfError> {
    Ok(per_cpu(map, index)?.iter().fold(0, |sum: u64, value| sum.wrapping_add(*value)))
}

pub(crate) fn refused(step: String, error: &(dyn std::error::Error + 'static)) -> EbpfError {
    EbpfError::Refused { step, reason: reason(error) }
}

fn missing(name: &str) -> EbpfError {
    EbpfError::Refused { step: name.to_owned(), reason: "the embedded object does not hold it".to_owned() }
}

/// Formats the error with its causes in one line. Only the end of a verifier log is kept, which contains the
/// reason.
fn reason(error: &(dyn std::error::Error + 'static)) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let shown = match lines.as_slice() {
            [first, rest @ ..] if rest.len() > LOG_LINES_SHOWN => {
                format!("{first} … {}", rest[rest.len() - LOG_LINES_SHOWN..].join(" | "))
            }
            few => few.join(" | "),
        };
        if !parts.iter().any(|part| part.contains(&shown)) {
            parts.push(shown);
        }
        next = error.source();
    }
    parts.join(": ")
}

#[cfg(test)]
mod tests {
    use super::reason;

    #[derive(Debug, thiserror::Error)]
    #[error("load failed: {0}")]
    struct Outer(String, #[source] std::io::Error);

    #[test]
    fn reasons_are_short_and_complete() {
        let log: String = (0..100).map(|line| format!("{line}: (bf) r1 = r2\n")).collect();
        let error = Outer(log + "R1 invalid mem access\n", std::io::Error::from_raw_os_error(13));
        let text = reason(&error);
        assert!(text.starts_with("load failed: 0: (bf)"), "{text}");
        assert!(text.contains("R1 invalid mem access"), "{text}");
        assert!(text.contains("os error 13"), "{text}");
        assert!(text.len() < 300, "{text}");
    }
}
