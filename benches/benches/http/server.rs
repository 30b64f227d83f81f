//! The server under test, in a separate process, so that its CPU time and its memory can be measured.

use std::env;
use std::error::Error;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use octavo_engine::mock::{MockConfig, MockExecutor};
use octavo_engine::{Engine, EngineConfig};
use octavo_server::{Server, ServerConfig, Shutdown, TextModel};
use octavo_telemetry::{Telemetry, TelemetryConfig};
use tokio::net::TcpListener;

use crate::bare;
use crate::tokenizer::{TEXT_TOKENS_START, tokenizer};

/// Environment variable of the child process with the name of a [`Stack`].
const ROLE: &str = "OCTAVO_BENCH_SERVER";

/// Environment variable of the child process with the duration of a step of the mock in microseconds.
const STEP: &str = "OCTAVO_BENCH_STEP_MICROS";

/// Maximum number of running requests: more than any load has.
const MAX_NUM_SEQS: usize = 512;

/// The layer between the socket and the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stack {
    /// The whole server.
    Server,
    /// A loop that writes prepared bytes.
    Bare,
}

impl Stack {
    /// Returns the name in the environment and in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Server => "octavo",
            Self::Bare => "bare",
        }
    }
}

/// Name of the served model.
pub(crate) const MODEL: &str = "bench";

/// Returns whether this process is the server.
pub(crate) fn is_server() -> bool {
    env::var_os(ROLE).is_some()
}

/// Serves until standard input ends. The first line on standard output is the port.
pub(crate) fn serve() -> Result<(), Box<dyn Error>> {
    let tokenizer = Arc::new(tokenizer()?);
    let vocab_size = tokenizer.vocab_size();
    let mock = MockConfig {
        vocab_size,
        tokens: TEXT_TOKENS_START..vocab_size as u32,
        blocks: 1 << 15,
        max_rows: MAX_NUM_SEQS + 64,
        max_in_flight: 2,
        verify: false,
        step_latency: Duration::from_micros(env::var(STEP)?.parse()?),
        ..MockConfig::default()
    };
    let limits = EngineConfig { max_num_seqs: MAX_NUM_SEQS, max_num_batched_tokens: 8192, ..EngineConfig::default() };
    let telemetry = Telemetry::new(TelemetryConfig { model_name: MODEL.into(), engine: 0, max_model_len: 2048 });
    let engine = Engine::spawn(Box::new(MockExecutor::new(mock)), limits, telemetry.engine())?;
    let config = ServerConfig { served_model_names: vec![MODEL.into()], vocab_size, ..ServerConfig::default() };
    let server =
        Server::new(engine.handle(), TextModel { tokenizer, template: None, images: None }, telemetry, config, None);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?.port());
        io::stdout().flush()?;
        let shutdown = Shutdown::new();
        let ended = tokio::task::spawn_blocking(|| io::stdin().read_to_end(&mut Vec::new()));
        let serving = async {
            if env::var(ROLE)? == Stack::Bare.name() {
                Ok(bare::serve(listener, engine.handle()).await?)
            } else {
                Ok(server.serve(listener, shutdown).await?)
            }
        };
        tokio::select! {
            result = serving => result,
            _ = ended => Ok(()),
        }
    })
}

/// The child process. Dropping it ends it.
pub(crate) struct ServerProcess {
    child: Child,
    pub(crate) url: String,
    /// Standard output, kept open because the server may write to it.
    _stdout: BufReader<ChildStdout>,
}

impl ServerProcess {
    /// Starts this program again as the server and waits until it listens.
    pub(crate) fn start(stack: Stack, step: Duration) -> Result<Self, Box<dyn Error>> {
        let mut child = Command::new(env::current_exe()?)
            .env(ROLE, stack.name())
            .env(STEP, step.as_micros().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut stdout = BufReader::new(child.stdout.take().ok_or("the server has no standard output")?);
        let mut port = String::new();
        stdout.read_line(&mut port)?;
        Ok(Self { child, url: format!("http://127.0.0.1:{}", port.trim()), _stdout: stdout })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // The process ends by itself; a failure here cannot be reported.
        let _ = self.child.wait();
    }
}
