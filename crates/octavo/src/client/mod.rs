//! `octavo chat`, `octavo run` and `octavo complete`: a conversation in the terminal; `octavo ps`: a running server.

mod command;
mod connection;
mod editor;
mod images;
pub(crate) mod parameters;
mod ps;
mod session;
mod terminal;

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use octavo_http_client::Certificates;

use crate::cli::{ChatArgs, CompleteArgs, ComposeArgs, DEFAULT_MODEL, RequestArgs, RunArgs, ServerArgs};
pub(crate) use crate::client::connection::Client;
use crate::client::parameters::Parameters;
pub(crate) use crate::client::ps::ps;
use crate::client::session::{Interrupts, Session};
use crate::client::terminal::{Input, Screen};
use crate::serve;
use crate::serve::settings::log_config;

/// Where a server is looked for when neither it nor a model is named.
const DEFAULT_URL: &str = "http://127.0.0.1:8000/v1";

pub(crate) fn chat(args: ChatArgs) -> Result<()> {
    let input = Input::new(args.quick.clone(), args.style.history.then(editor::history_file).flatten())?;
    let parameters = parameters(&args.request, &args.compose);
    let system = args.style.system_prompt.clone();
    let images = images::urls(&args.style.image)?;
    let conversation = async |client| {
        let session = Session::new(client, parameters, system, Screen::stdout()).with_images(images);
        session.chat(input, interrupts()?).await
    };
    match args.compose.model.given() {
        Some(_) => with_model(&args.compose, conversation),
        None => with_server(&args.server, &args.compose, conversation),
    }
}

pub(crate) fn complete(args: CompleteArgs) -> Result<()> {
    let input = Input::new(args.quick.clone(), None)?;
    let parameters = parameters(&args.request, &args.compose);
    let conversation = async |client| {
        let session = Session::new(client, parameters, None, Screen::stdout());
        session.complete(input, interrupts()?).await
    };
    match args.compose.model.given() {
        Some(_) => with_model(&args.compose, conversation),
        None => with_server(&args.server, &args.compose, conversation),
    }
}

pub(crate) fn run(mut args: RunArgs) -> Result<()> {
    match args.compose.model.given() {
        None => args.compose.model.positional = Some(DEFAULT_MODEL.to_owned()),
        Some(text) if text.contains(char::is_whitespace) && !Path::new(text).exists() => {
            bail!("'{text}' is not the name of a model: give one before the prompt (octavo run MODEL PROMPT)")
        }
        Some(_) => {}
    }
    let input = match args.prompt.is_empty() {
        true => Input::new(None, args.style.history.then(editor::history_file).flatten())?,
        false => Input::with_piped(args.prompt.join(" ")),
    };
    let parameters = parameters(&args.request, &args.compose);
    let system = args.style.system_prompt.clone();
    let images = images::urls(&args.style.image)?;
    with_model(&args.compose, async |client| {
        let session = Session::new(client, parameters, system, Screen::stdout()).with_images(images);
        session.chat(input, interrupts()?).await
    })
}

fn parameters(args: &RequestArgs, compose: &ComposeArgs) -> Parameters {
    Parameters::new(args, compose.sampling.seed)
}

/// Runs a conversation with a model that is loaded for it.
fn with_model(compose: &ComposeArgs, conversation: impl AsyncFnOnce(Client) -> Result<()>) -> Result<()> {
    init_logging(compose)?;
    let composed = serve::compose_in_process(compose)?;
    let client = Client::local(composed.server.router(), &composed.model_name);
    let result = block_on(conversation(client));
    composed.engine.join();
    result
}

/// Runs a conversation with a running server.
fn with_server(
    args: &ServerArgs,
    compose: &ComposeArgs,
    conversation: impl AsyncFnOnce(Client) -> Result<()>,
) -> Result<()> {
    init_logging(compose)?;
    let url = args.url.as_deref().unwrap_or(DEFAULT_URL);
    block_on(async {
        let client =
            Client::connect(url, args.api_key.as_deref(), &certificates(args.insecure), args.model_name.as_deref())
                .await;
        let client = client.map_err(|error| match args.url {
            Some(_) => error,
            None => anyhow!(
                "{}; `octavo serve` starts a server, and `octavo run` chats without one",
                crate::report::sentence(&error)
            ),
        })?;
        conversation(client).await
    })
}

/// The certificates that an encrypted server may have.
pub(crate) fn certificates(insecure: bool) -> Certificates {
    if insecure { Certificates::Any } else { Certificates::from_environment() }
}

/// Only warnings are shown between the messages, unless the environment asks for more.
fn init_logging(compose: &ComposeArgs) -> Result<()> {
    let quiet = std::env::var_os("RUST_LOG").is_none() && std::env::var_os("VLLM_LOGGING_LEVEL").is_none();
    Ok(octavo_telemetry::init_logging(&log_config(&compose.observe, quiet.then_some("warning")))?)
}

fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(work);
    // A thread that waits for standard input is not waited for.
    runtime.shutdown_background();
    result
}

/// Ctrl-C, again and again.
fn interrupts() -> Result<Interrupts> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut signals = signal(SignalKind::interrupt())?;
    let (send, interrupts) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        while signals.recv().await.is_some() {
            // One that is not taken yet stands for both.
            let _ = send.try_send(());
        }
    });
    Ok(interrupts)
}

#[cfg(test)]
mod tests;
