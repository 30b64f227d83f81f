//! `octavo chat` and `octavo complete`: a conversation in the terminal.

mod connection;
mod terminal;

use std::io::{self, Write};

use anyhow::Result;
use serde_json::{Value, json};

use crate::cli::{ChatArgs, ClientArgs, CompleteArgs, ComposeArgs};
pub(crate) use crate::client::connection::Client;
use crate::client::connection::Piece;
use crate::client::terminal::{Input, Screen};
use crate::serve::settings::log_config;
use crate::serve::{self, Composed};

/// Where a server is looked for when neither it nor a model is named.
const DEFAULT_URL: &str = "http://127.0.0.1:8000/v1";

const COMMANDS: &str = "commands: /reset forgets the conversation, /exit ends; Ctrl-C stops an answer";

pub(crate) fn chat(args: ChatArgs) -> Result<()> {
    let mut messages: Vec<Value> = vec![];
    messages.extend(args.system_prompt.as_deref().map(|text| json!({"role": "system", "content": text})));
    with_client(&args.client, &args.compose, async |client| {
        let session = Session { client, max_tokens: args.client.max_tokens, screen: Screen::stdout() };
        session.chat(messages, Input::new(args.quick.clone()), interrupts()?).await
    })
}

pub(crate) fn complete(args: CompleteArgs) -> Result<()> {
    with_client(&args.client, &args.compose, async |client| {
        let session = Session { client, max_tokens: args.client.max_tokens, screen: Screen::stdout() };
        session.complete(Input::new(args.quick.clone()), interrupts()?).await
    })
}

/// Runs a conversation with the server at `--url`, or with a model that is loaded for it.
fn with_client(
    args: &ClientArgs,
    compose: &ComposeArgs,
    conversation: impl AsyncFnOnce(Client) -> Result<()>,
) -> Result<()> {
    let quiet = std::env::var_os("RUST_LOG").is_none() && std::env::var_os("VLLM_LOGGING_LEVEL").is_none();
    octavo_telemetry::init_logging(&log_config(&compose.observe, quiet.then_some("warning")))?;
    let local = args.url.is_none() && compose.model.given().is_some();
    let composed = local.then(|| serve::compose_in_process(compose)).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let client = match &composed {
            Some(Composed { server, model_name, .. }) => Client::local(server.router(), model_name),
            None => {
                let url = args.url.as_deref().unwrap_or(DEFAULT_URL);
                Client::connect(url, args.api_key.as_deref(), args.model_name.as_deref()).await?
            }
        };
        conversation(client).await
    });
    // A thread that waits for a line of the terminal is not waited for.
    runtime.shutdown_background();
    if let Some(composed) = composed {
        composed.engine.join();
    }
    result
}

/// Ctrl-C, again and again.
fn interrupts() -> Result<tokio::sync::mpsc::Receiver<()>> {
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

type Interrupts = tokio::sync::mpsc::Receiver<()>;

/// A conversation.
struct Session<W> {
    client: Client,
    max_tokens: Option<u32>,
    screen: Screen<W>,
}

/// How an answer came to its end.
enum Outcome {
    /// By itself, with its text.
    Whole(String),
    /// By Ctrl-C, with what there was.
    Stopped(String),
}

impl<W: Write> Session<W> {
    async fn chat(mut self, mut messages: Vec<Value>, mut input: Input, mut interrupts: Interrupts) -> Result<()> {
        let begin = messages.len();
        input.greet(&format!("{} ({COMMANDS})", self.client.model()));
        while let Some(line) = next(&mut input, &mut interrupts).await? {
            match line.trim() {
                "" => continue,
                "/exit" | "/quit" if input.is_typed() => break,
                "/reset" if input.is_typed() => messages.truncate(begin),
                command if input.is_typed() && command.starts_with('/') => eprintln!("{COMMANDS}"),
                _ => {
                    messages.push(json!({"role": "user", "content": line}));
                    let request = self.request(json!({"messages": messages}));
                    let answer = self.answer("/chat/completions", &request, &mut interrupts).await;
                    match self.told(answer, &input)? {
                        Some(text) => messages.push(json!({"role": "assistant", "content": text})),
                        // As if it had not been asked.
                        None => messages.truncate(messages.len() - 1),
                    }
                }
            }
        }
        Ok(())
    }

    async fn complete(mut self, mut input: Input, mut interrupts: Interrupts) -> Result<()> {
        input.greet(&format!("{} (each line is continued; Ctrl-C stops an answer)", self.client.model()));
        while let Some(line) = next(&mut input, &mut interrupts).await? {
            if line.is_empty() {
                continue;
            }
            let request = self.request(json!({"prompt": line}));
            let answer = self.answer("/completions", &request, &mut interrupts).await;
            self.told(answer, &input)?;
        }
        Ok(())
    }

    fn request(&self, mut request: Value) -> Value {
        request["model"] = self.client.model().into();
        request["stream"] = true.into();
        if let Some(tokens) = self.max_tokens {
            request["max_tokens"] = tokens.into();
        }
        request
    }

    /// Streams an answer to the screen, until its end or Ctrl-C.
    async fn answer(&mut self, path: &str, request: &Value, interrupts: &mut Interrupts) -> Result<Outcome> {
        let (client, screen) = (&mut self.client, &mut self.screen);
        let mut text = String::new();
        let mut written = Ok(());
        let stream = client.stream(path, request, |piece| {
            if let Piece::Content(content) = piece {
                text.push_str(content);
            }
            if written.is_ok() {
                written = screen.piece(piece);
            }
            written.is_ok()
        });
        let stopped = tokio::select! {
            streamed = stream => {
                streamed?;
                false
            }
            _ = interrupts.recv() => true,
        };
        written?;
        self.screen.end(stopped)?;
        if stopped {
            self.client.disconnect();
            return Ok(Outcome::Stopped(text));
        }
        Ok(Outcome::Whole(text))
    }

    /// The answer's text, if there is one to remember. Errors end a conversation that nobody types, and are told in one
    /// that somebody does.
    fn told(&mut self, answer: Result<Outcome>, input: &Input) -> Result<Option<String>> {
        match answer {
            Ok(Outcome::Whole(text)) => Ok(Some(text)),
            Ok(Outcome::Stopped(text)) => Ok(Some(text).filter(|text| !text.is_empty())),
            Err(error) if input.is_typed() && !error.is::<io::Error>() => {
                self.client.disconnect();
                eprintln!("error: {error:#}");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// The next line; `None` at the end of the input, or at a Ctrl-C while there is no answer to stop.
async fn next(input: &mut Input, interrupts: &mut Interrupts) -> Result<Option<String>> {
    let line = input.next();
    tokio::select! {
        line = line => Ok(line?),
        _ = interrupts.recv() => Ok(None),
    }
}

#[cfg(test)]
mod tests;
