//! The process that renders chat templates of clients: this program with an argument of its own.
//!
//! Templates may need any amount of stack, memory and time. The operating system stops a process that exceeds its
//! limits, and the server is told by the missing answer.

use std::io::{self, Read, Write};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use octavo_server::TemplateHelper;
use rustix::process::{Resource, Rlimit, setrlimit};

/// The first argument, which no user types.
const ARGUMENT: &str = "__render-chat-template";

/// Stack of the thread that parses and renders. What it does not touch costs nothing.
const STACK_BYTES: usize = 64 << 20;

/// Private memory of the process, with the stack.
const MEMORY_BYTES: u64 = 512 << 20;

/// Time on a processor. A long conversation needs some milliseconds.
const CPU_SECONDS: u64 = 2;

/// Time after which the process ends itself, however little of it has run.
const DEADLINE: Duration = Duration::from_secs(10);

/// The command that starts such a process.
pub(crate) fn command() -> TemplateHelper {
    // The running file, even if another one has taken its name.
    let running = "/proc/self/exe";
    let program = if std::path::Path::new(running).exists() {
        running.into()
    } else {
        std::env::current_exe().unwrap_or_else(|_| "octavo".into())
    };
    TemplateHelper { program, args: vec![ARGUMENT.into()] }
}

/// Whether this process is to render a template.
pub(crate) fn is_asked_for() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == ARGUMENT)
}

/// Reads a request from standard input and writes the answer to standard output.
pub(crate) fn run() -> ExitCode {
    match limit().and_then(|()| answer()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("octavo: {error}");
            ExitCode::FAILURE
        }
    }
}

fn limit() -> io::Result<()> {
    let exactly = |value| Rlimit { current: Some(value), maximum: Some(value) };
    setrlimit(Resource::Core, exactly(0))?;
    setrlimit(Resource::Cpu, exactly(CPU_SECONDS))?;
    setrlimit(Resource::Data, exactly(MEMORY_BYTES))?;
    thread::Builder::new().spawn(|| {
        thread::sleep(DEADLINE);
        std::process::abort();
    })?;
    Ok(())
}

fn answer() -> io::Result<()> {
    let mut request = Vec::new();
    io::stdin().lock().read_to_end(&mut request)?;
    let rendering =
        thread::Builder::new().stack_size(STACK_BYTES).spawn(move || octavo_text::answer_untrusted(&request))?;
    let answer = rendering.join().map_err(|_| io::Error::other("the template could not be rendered"))?;
    io::stdout().lock().write_all(&answer)
}
