//! The processors that a thread may use.

use std::str::FromStr;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Processors by number; by default those of the process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cores(Option<CpuSet>);

/// Why a list of processors is of no use.
#[derive(Debug, thiserror::Error)]
pub enum CoresError {
    /// It is not like `0-3,8`.
    #[error("{0:?} is not a range of cores like 0-3")]
    Range(String),
    /// The process may use none of them.
    #[error("this process may use none of these cores")]
    Forbidden,
    /// The system refuses.
    #[error("sched_setaffinity: {0}")]
    System(#[from] rustix::io::Errno),
}

impl FromStr for Cores {
    type Err = CoresError;

    /// Ranges and numbers like `0-3,8`; nothing is no choice.
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
    /// Whether the process may use one of them.
    ///
    /// # Errors
    /// [`CoresError::Forbidden`] when not.
    pub fn check(&self) -> Result<(), CoresError> {
        let Some(wanted) = &self.0 else { return Ok(()) };
        let allowed = sched_getaffinity(None)?;
        match (0..CpuSet::MAX_CPU).any(|core| wanted.is_set(core) && allowed.is_set(core)) {
            true => Ok(()),
            false => Err(CoresError::Forbidden),
        }
    }

    /// Keeps the calling thread, and those that it starts from now on, on those of these that the process may use.
    ///
    /// # Errors
    /// As [`Self::check`], or when the system refuses.
    pub fn bind_thread(&self) -> Result<(), CoresError> {
        self.check()?;
        Ok(self.0.as_ref().map_or(Ok(()), |set| sched_setaffinity(None, set))?)
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
    fn a_thread_stays_where_it_is_put() {
        let allowed = sched_getaffinity(None).expect("affinity");
        let mut cores = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core));
        let last = cores.next_back().expect("a core");
        let bound = std::thread::spawn(move || {
            let before = Cores::default().bind_thread();
            last.to_string().parse::<Cores>().expect("a list").bind_thread().expect("allowed");
            (
                before.is_ok(),
                sched_getaffinity(None).expect("affinity").count(),
                rustix::thread::sched_getcpu(),
            )
        });
        assert_eq!(bound.join().expect("no panic"), (true, 1, last));
        let forbidden = (0..CpuSet::MAX_CPU).find(|&core| !allowed.is_set(core)).expect("one of 1024");
        let forbidden: Cores = forbidden.to_string().parse().expect("a list");
        assert!(matches!(forbidden.bind_thread(), Err(CoresError::Forbidden)));
    }
}
