//! `kvasir mock`: engines without a model, for tests and measurements of gateways.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use router_tokens::ModelText;
use tools_mocker::{Dialect, Fault, Mock, MockConfig, Role};

#[derive(ValueEnum, Clone, Copy)]
enum DialectName {
    Vllm,
    Sglang,
}

#[derive(Args)]
pub(crate) struct MockArgs {
    /// Number of workers.
    #[arg(long, default_value_t = 1)]
    workers: u16,
    /// Address of the first worker; the others use the following ports (0 lets the system choose all ports).
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:9000")]
    listen: SocketAddr,
    /// Engine whose API the workers imitate.
    #[arg(long, value_enum, default_value = "vllm")]
    dialect: DialectName,
    /// Phases that the workers compute.
    #[arg(long, value_enum, default_value = "both")]
    role: crate::Role,
    /// Imitate vLLM with KvasirConnector: the workers report their hand-off address in their metrics.
    #[arg(long)]
    kvasir_connector: bool,
    /// Name of the model.
    #[arg(long, default_value = "tiny")]
    model: String,
    /// Name of a LoRA adapter that the workers have (vLLM only). May be given several times.
    #[arg(long = "adapter", value_name = "NAME")]
    adapters: Vec<String>,
    /// Hugging Face folder with a tokenizer and a chat template (default: the built-in ones).
    #[arg(long, value_name = "FOLDER")]
    model_folder: Option<PathBuf>,
    /// Tokens of a KV block.
    #[arg(long, default_value_t = 16)]
    block_tokens: usize,
    /// KV blocks of each worker.
    #[arg(long, default_value_t = 16_384)]
    blocks: usize,
    /// Longest sequence in tokens.
    #[arg(long, default_value_t = 131_072)]
    context_tokens: usize,
    /// Publish KV events.
    #[arg(long)]
    events: bool,
    /// Prompt tokens computed per second. 0: unlimited; with `--step-ms 0`, answers then come at once.
    #[arg(long, default_value_t = 0.0)]
    prefill_rate: f64,
    /// Time of a step, in milliseconds.
    #[arg(long, default_value_t = 0.0)]
    step_ms: f64,
    /// Time that each running request adds to a step, in microseconds.
    #[arg(long, default_value_t = 0.0)]
    request_us: f64,
    /// Time that each token of KV cache adds to a step, in microseconds.
    #[arg(long, default_value_t = 0.0)]
    kv_token_us: f64,
    /// Time that a prompt adds to a step for the square of its token count, in microseconds.
    #[arg(long, default_value_t = 0.0)]
    prompt_square_us: f64,
    /// Support sleep, and take this time to wake, in milliseconds.
    #[arg(long, value_name = "MILLISECONDS")]
    wake_ms: Option<u64>,
    /// A fault that is active from the start, in the format of `POST /mock/faults`. May be given several
    /// times.
    #[arg(long = "fault", value_name = "JSON")]
    faults: Vec<String>,
    /// Random seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn config(args: &MockArgs, number: u16) -> Result<MockConfig> {
    let tokenizer = match &args.model_folder {
        Some(folder) => ModelText::from_folder(folder).context("--model-folder")?,
        None => ModelText::tiny()?,
    };
    let context_tokens = args.context_tokens.min(args.blocks.saturating_sub(1) * args.block_tokens);
    Ok(MockConfig {
        dialect: match args.dialect {
            DialectName::Vllm => Dialect::Vllm,
            DialectName::Sglang => Dialect::Sglang,
        },
        model: args.model.clone(),
        adapters: args.adapters.clone(),
        block_tokens: args.block_tokens,
        blocks: args.blocks,
        context_tokens,
        prefill_seconds_per_token: if args.prefill_rate > 0.0 { 1.0 / args.prefill_rate } else { 0.0 },
        decode_seconds_per_step: args.step_ms / 1e3,
        decode_seconds_per_request: args.request_us / 1e6,
        decode_seconds_per_kv_token: args.kv_token_us / 1e6,
        prefill_seconds_per_square: args.prompt_square_us / 1e6,
        events: args.events,
        role: match args.role {
            crate::Role::Prefill => Role::Prefill,
            crate::Role::Decode => Role::Decode,
            crate::Role::Both => Role::Both,
        },
        has_data_plane: args.kvasir_connector,
        seed: args.seed + u64::from(number),
        tokenizer,
        body_bytes_max: 256 << 20,
        wake: args.wake_ms.map(Duration::from_millis),
        ..MockConfig::tiny()?
    })
}

pub(crate) fn run(args: &MockArgs) -> Result<ExitCode> {
    let faults = args.faults.iter().map(|fault| serde_json::from_str(fault).context("--fault"));
    let faults = faults.collect::<Result<Vec<Fault>>>()?;
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let mut mocks = Vec::new();
        for number in 0..args.workers {
            let mut listen = args.listen;
            if listen.port() > 0 {
                let port = listen.port().checked_add(number).context("there are not so many ports")?;
                listen.set_port(port);
            }
            let mock = Mock::start(config(args, number)?, listen).await?;
            faults.iter().try_for_each(|fault| mock.fault(fault.clone()))?;
            println!("{}", mock.url());
            mocks.push(mock);
        }
        tokio::signal::ctrl_c().await?;
        for mock in mocks {
            tokio::time::timeout(Duration::from_secs(1), mock.stop()).await.ok();
        }
        Ok(ExitCode::SUCCESS)
    })
}
