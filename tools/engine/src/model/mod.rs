//! The transformer: configuration, weights and the forward pass.

mod attention;
mod config;
mod forward;
mod matrix;
mod rope;
mod weights;
mod weights_image;

pub use config::{ModelConfig, RopeScaling};
pub use forward::{Item, Model, Rows};
