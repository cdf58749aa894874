//! The crate against machines made of files.

mod choice;
mod description;
mod distances;
mod fixtures;
mod hostile;
mod pictures;
mod warnings;
