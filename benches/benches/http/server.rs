//! The server under test, in a process of its own so that its CPU time and its memory are its own.

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

/// Set in the child's environment, to the name of a [`Stack`].
const ROLE: &str = "OCTAVO_BENCH_SERVER";

/// Set in the child's environment: what a step of the mock takes, in microseconds.
const STEP: &str = "OCTAVO_BENCH_STEP_MICROS";

/// What stands between the socket and the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stack {
    /// The whole server.
    Server,
    /// A loop that writes ready bytes.
    Bare,
}

impl Stack {
    /// Its name in the environment and in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Server => "octavo",
            Self::Bare => "bare",
        }
    }
}

/// The served name.
pub(crate) const MODEL: &str = "bench";

/// Whether this process is the server.
pub(crate) fn is_server() -> bool {
    env::var_os(ROLE).is_some()
}

/// Serves until standard input ends; the first line on standard output is the port.
pub(crate) fn serve() -> Result<(), Box<dyn Error>> {
    let tokenizer = Arc::new(tokenizer()?);
    let vocab_size = tokenizer.vocab_size();
    let mock = MockConfig {
        vocab_size,
        tokens: TEXT_TOKENS_START..vocab_size as u32,
        blocks: 1 << 15,
        max_in_flight: 2,
        verify: false,
        step_latency: Duration::from_micros(env::var(STEP)?.parse()?),
        ..MockConfig::default()
    };
    let limits = EngineConfig { max_num_seqs: 512, max_num_batched_tokens: 8192, ..EngineConfig::default() };
    let telemetry = Telemetry::new(TelemetryConfig { model_name: MODEL.into(), engine: 0, max_model_len: 2048 });
    let engine = Engine::spawn(Box::new(MockExecutor::new(mock)), limits, telemetry.engine())?;
    let config = ServerConfig { served_model_names: vec![MODEL.into()], vocab_size, ..ServerConfig::default() };
    let server = Server::new(engine.handle(), TextModel { tokenizer, template: None }, telemetry, config);
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

/// The child process; dropping it ends it.
pub(crate) struct ServerProcess {
    child: Child,
    pub(crate) url: String,
    /// Kept open: the server may write to it.
    _stdout: BufReader<ChildStdout>,
}

impl ServerProcess {
    /// Starts this program again in the other role, and waits until it listens.
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
        // It ends by itself; if it does not, there is nobody left to tell.
        let _ = self.child.wait();
    }
}
