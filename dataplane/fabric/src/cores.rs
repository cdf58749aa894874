//! The processors that a thread may use.

use std::str::FromStr;

use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};

/// Processors by number. Default: the processors that the thread may use already.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cores(Option<CpuSet>);

/// Cause of an unusable list of processors.
#[derive(Debug, thiserror::Error)]
pub enum CoresError {
    /// A part of the list has not the form `0-3` or `8`.
    #[error("{0:?} is not a range of cores like 0-3")]
    Range(String),
    /// The machine or the process's cpuset has none of the listed processors.
    #[error("this process may use none of these cores")]
    Forbidden,
    /// The system refused the processors.
    #[error("sched_setaffinity: {0}")]
    System(Errno),
}

impl FromStr for Cores {
    type Err = CoresError;

    /// Parses ranges and numbers like `0-3,8`. An empty text leaves the processors as they are.
    fn from_str(text: &str) -> Result<Self, CoresError> {
        if text.trim().is_empty() {
            return Ok(Self(None));
        }
        let mut set = CpuSet::new();
        for part in text.split(',') {
            let wrong = || CoresError::Range(part.to_owned());
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<usize>().map_err(|_| wrong());
            let (first, last) = (number(first)?, number(last)?);
            if first > last || last >= CpuSet::MAX_CPU {
                return Err(wrong());
            }
            (first..=last).for_each(|core| set.set(core));
        }
        Ok(Self(Some(set)))
    }
}

impl Cores {
    /// Returns the part of these processors that the calling thread may use now; `None` when there is none.
    #[must_use]
    pub fn allowed(&self) -> Option<Self> {
        let (wanted, allowed) = (self.0.as_ref()?, rustix::thread::sched_getaffinity(None).ok()?);
        let mut both = CpuSet::new();
        (0..CpuSet::MAX_CPU)
            .filter(|&core| wanted.is_set(core) && allowed.is_set(core))
            .for_each(|core| both.set(core));
        (both.count() > 0).then_some(Self(Some(both)))
    }

    /// Binds the calling thread, and the threads that it starts from now on, to those of these processors
    /// that the process's cpuset has.
    ///
    /// # Errors
    /// [`CoresError::Forbidden`] when the cpuset has none of them.
    pub fn bind_thread(&self) -> Result<(), CoresError> {
        let Some(set) = &self.0 else { return Ok(()) };
        sched_setaffinity(None, set).map_err(|errno| match errno {
            Errno::INVAL => CoresError::Forbidden,
            errno => CoresError::System(errno),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_bad_ones_named() {
        let Cores(Some(set)) = "0-2, 5".parse().expect("a list") else { panic!("a choice") };
        assert_eq!((0..8).filter(|&core| set.is_set(core)).collect::<Vec<_>>(), [0, 1, 2, 5]);
        assert_eq!(" ".parse::<Cores>().expect("no choice"), Cores::default());
        for bad in ["a", "3-1", "99999", "1,,2", "-1"] {
            assert!(matches!(bad.parse::<Cores>(), Err(CoresError::Range(_))), "{bad}");
        }
    }

    #[test]
    fn cores_that_a_thread_may_use_are_a_part_of_those_that_it_should() {
        let allowed = rustix::thread::sched_getaffinity(None).expect("affinity");
        let first = (0..CpuSet::MAX_CPU).find(|&core| allowed.is_set(core)).expect("one");
        let some: Cores = format!("{first},{}", CpuSet::MAX_CPU - 1).parse().expect("a list");
        let Some(Cores(Some(found))) = some.allowed() else { panic!("one of them is") };
        assert!(found.is_set(first));
        let absent: Cores = (CpuSet::MAX_CPU - 1).to_string().parse().expect("a list");
        assert_eq!(absent.allowed().is_some(), allowed.is_set(CpuSet::MAX_CPU - 1));
        assert_eq!(Cores::default().allowed(), None);
    }

    #[test]
    fn a_thread_stays_where_it_is_put_and_may_be_put_elsewhere() {
        let allowed = rustix::thread::sched_getaffinity(None).expect("affinity");
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
        let (first, last) = (cores[0], cores[cores.len() - 1]);
        let bound = std::thread::spawn(move || {
            let put = |core: usize| core.to_string().parse::<Cores>().expect("a list").bind_thread();
            Cores::default().bind_thread().expect("no choice");
            put(first).expect("allowed");
            // The thread's mask has the first core only; the process's cpuset decides.
            put(last).expect("allowed");
            rustix::thread::sched_getcpu()
        });
        assert_eq!(bound.join().expect("no panic"), last);
        let absent: Cores = (CpuSet::MAX_CPU - 1).to_string().parse().expect("a list");
        if !allowed.is_set(CpuSet::MAX_CPU - 1) {
            assert!(matches!(absent.bind_thread(), Err(CoresError::Forbidden)));
        }
    }
}
