//! Tables of real-looking outputs, one module per family, and properties over random ones.

mod harness;
mod json_families;
mod properties;
mod reasoning;
mod section_families;
mod typed_families;
