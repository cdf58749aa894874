//! The TOML configuration file.
//!
//! Each key is declared once, in `settings`, with its meaning, default and range. From that declaration come the
//! typed struct, the check (all problems at once, with line and the nearest known name), `kvasir config
//! explain`, the JSON schema, the reference documentation and the commented example, so none of them can
//! disagree with the others.
//!
//! Values that reach other crates are plain numbers and durations: the conversion is in the composition root.

#![forbid(unsafe_code)]

mod changes;
mod load;
mod macros;
mod pools;
mod reference;
mod seasons;
mod settings;
mod value;

pub use changes::{Change, changes, in_force};
pub use load::{ConfigError, Problem, load, parse, weight_of};
pub use pools::{PoolSettings, SplitSettings};
pub use reference::{example, explain, json_schema, markdown};
pub use seasons::seconds as season_seconds;
pub use settings::{
    AccessSettings, ControlSettings, DatabaseSettings, DiscoverySettings, DiskTierSettings, DrainSettings,
    EbpfSettings, EngineSettings, EtcdSettings, FaultSettings, GatewaySettings, GuardrailSettings,
    HostTierSettings, ObjectTierSettings, PickerSettings, PlannerSettings, RdmaSettings, RemoteTierSettings,
    RouterSettings, ServeSettings, Settings, StoreSettings, TlsSettings, TraceSettings, TransferSettings,
    WorkerSettings,
};
pub use value::{Bytes, Kind, Paths, Range, Setting};
