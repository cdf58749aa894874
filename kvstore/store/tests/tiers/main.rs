//! The store as a worker uses it: blocks go out and come back as they were, through host memory and the disk, whatever
//! the disk does.

mod background;
mod blocks;
mod cost;
mod damage;
mod device;
mod far;
mod mapped;
mod retained;
mod rig;
