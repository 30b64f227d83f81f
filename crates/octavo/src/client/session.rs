//! A conversation with a model.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::client::command::{self, Command};
use crate::client::connection::{Client, Piece};
use crate::client::images;
use crate::client::parameters::Parameters;
use crate::client::terminal::{Input, Line, Screen};

/// Bytes of a file that `/read` takes.
const MAX_TEXT: u64 = 16 << 20;

/// Bytes of a saved conversation, which may have images.
const MAX_SAVED: u64 = 512 << 20;

/// Signals of Ctrl-C.
pub(crate) type Interrupts = tokio::sync::mpsc::Receiver<()>;

/// A conversation.
pub(crate) struct Session<W> {
    client: Client,
    parameters: Parameters,
    system: Option<String>,
    /// Messages of user and assistant.
    messages: Vec<Value>,
    /// Text that goes in front of the next message.
    attached: String,
    /// URLs of images that go in front of the next message.
    images: Vec<String>,
    screen: Screen<W>,
}

/// An answer, complete or not.
enum Outcome {
    /// The whole text.
    Whole(String),
    /// The text up to Ctrl-C.
    Stopped(String),
}

impl<W: Write> Session<W> {
    pub(crate) fn new(client: Client, parameters: Parameters, system: Option<String>, screen: Screen<W>) -> Self {
        Self { client, parameters, system, messages: vec![], attached: String::new(), images: vec![], screen }
    }

    /// Puts images in front of the first message.
    pub(crate) fn with_images(self, images: Vec<String>) -> Self {
        Self { images, ..self }
    }

    /// Answers messages until the input ends or the user leaves.
    ///
    /// # Errors
    /// The input or the output fails; where nobody types, a request as well.
    pub(crate) async fn chat(mut self, mut input: Input, mut interrupts: Interrupts) -> Result<()> {
        input.greet(&format!("{} (/help lists the commands, Ctrl-D exits)", self.client.model()));
        while let Some(line) = next(&mut input, &mut interrupts).await? {
            let command = if input.is_typed() { Command::parse(&line) } else { Command::Message(&line) };
            match command {
                Command::Bye => break,
                Command::Message(text) if text.trim().is_empty() => {}
                Command::Message(text) => self.turn(text, input.is_typed(), &mut interrupts).await?,
                command => {
                    if let Err(error) = self.obey(command).await {
                        eprintln!("error: {}", crate::report::sentence(&error));
                    }
                }
            }
        }
        ensure!(input.is_typed() || self.images.is_empty(), "an image needs a message, and there is none");
        Ok(())
    }

    /// Continues texts until the input ends.
    ///
    /// # Errors
    /// As [`Self::chat`].
    pub(crate) async fn complete(mut self, mut input: Input, mut interrupts: Interrupts) -> Result<()> {
        input.greet(&format!("{} (enter the beginning of a text, Ctrl-D exits)", self.client.model()));
        while let Some(line) = next(&mut input, &mut interrupts).await? {
            if line.is_empty() {
                continue;
            }
            let request = self.request(json!({"prompt": line}));
            let answer = self.answer("/completions", &request, &mut interrupts).await;
            self.report(answer, input.is_typed())?;
        }
        Ok(())
    }

    /// Sends a message and remembers it with its answer.
    async fn turn(&mut self, text: &str, is_typed: bool, interrupts: &mut Interrupts) -> Result<()> {
        let content = images::content(&self.images, &format!("{}{text}", self.attached));
        self.messages.push(json!({"role": "user", "content": content}));
        let request = self.request(json!({"messages": self.all_messages()}));
        let answer = self.answer("/chat/completions", &request, interrupts).await;
        match self.report(answer, is_typed)? {
            Some(text) => {
                self.messages.push(json!({"role": "assistant", "content": text}));
                self.attached.clear();
                self.images.clear();
            }
            // The question is forgotten with its answer.
            None => self.messages.truncate(self.messages.len() - 1),
        }
        Ok(())
    }

    /// Runs a command other than a message.
    async fn obey(&mut self, command: Command<'_>) -> Result<()> {
        match command {
            Command::Show => {
                let defaults = self.model_defaults().await;
                eprint!("{}", self.parameters.described(&defaults));
            }
            Command::Set { name, value } => {
                self.parameters.set_parameter(name, value).map_err(anyhow::Error::msg)?;
                eprintln!("{name} is set to {value}");
            }
            Command::ShowSystem => eprintln!("{}", self.system.as_deref().unwrap_or("there is no system prompt")),
            Command::System(text) => {
                self.system = Some(text.to_owned()).filter(|text| !text.is_empty());
                eprintln!("the system prompt is {}", if text.is_empty() { "removed" } else { "set" });
            }
            Command::Clear => {
                self.messages.clear();
                self.attached.clear();
                self.images.clear();
                eprintln!("the conversation is forgotten");
            }
            Command::Read(path) => {
                let text = read_text(path, MAX_TEXT)?;
                eprintln!("{path} ({} bytes) goes in front of the next message", text.len());
                self.attached.push_str(&text);
                self.attached.push_str("\n\n");
            }
            Command::Image("") => {
                self.images.clear();
                eprintln!("the next message has no image");
            }
            Command::Image(source) => {
                self.images.push(images::url(source)?);
                eprintln!("{source} goes in front of the next message");
            }
            Command::Save(path) => {
                self.save(path)?;
                eprintln!("saved {} messages to {path}", self.messages.len());
            }
            Command::Load(path) => {
                self.load(path)?;
                eprintln!("loaded {} messages from {path}", self.messages.len());
            }
            Command::Help => eprint!("{}", command::HELP),
            Command::Wrong(sentence) => bail!(sentence),
            Command::Message(_) | Command::Bye => {}
        }
        Ok(())
    }

    fn all_messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// Adds the model and the parameters that the user chose. The model's defaults decide the rest.
    fn request(&self, mut request: Value) -> Value {
        request["model"] = self.client.model().into();
        request["stream"] = true.into();
        self.parameters.add_to(&mut request);
        request
    }

    /// The sampling defaults that the server reports; null where it does not.
    async fn model_defaults(&mut self) -> Value {
        let info = self.client.get("/server_info?config_format=json").await;
        let info: Option<Value> = info.ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        info.map_or(Value::Null, |info| info["vllm_config"]["sampling_defaults"].clone())
    }

    /// Writes the conversation to a file: a new one, or one that holds a saved conversation.
    fn save(&self, path: &str) -> Result<()> {
        let target = expanded(path);
        ensure!(
            !target.exists() || read_text(path, MAX_SAVED).is_ok_and(|text| saved(&text).is_ok()),
            "{path} is there already and is not a saved conversation"
        );
        let parameters = self.parameters.to_json();
        let text = json!({"model": self.client.model(), "messages": self.all_messages(), "parameters": parameters});
        std::fs::write(&target, format!("{text:#}\n")).with_context(|| path.to_owned())
    }

    fn load(&mut self, path: &str) -> Result<()> {
        let (mut messages, parameters) = saved(&read_text(path, MAX_SAVED)?).with_context(|| path.to_owned())?;
        let system = messages.first().filter(|message| message["role"] == "system");
        self.system = system.and_then(|message| message["content"].as_str()).map(str::to_owned);
        if system.is_some() {
            messages.remove(0);
        }
        (self.messages, self.parameters) = (messages, parameters);
        Ok(())
    }

    /// Streams an answer to the screen, until its end or Ctrl-C.
    async fn answer(&mut self, path: &str, request: &Value, interrupts: &mut Interrupts) -> Result<Outcome> {
        // Signals from before this answer do not stop it.
        while interrupts.try_recv().is_ok() {}
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

    /// The answer's text, if there is one to remember. An error is printed if a person types, and returned otherwise.
    fn report(&mut self, answer: Result<Outcome>, is_typed: bool) -> Result<Option<String>> {
        match answer {
            Ok(Outcome::Whole(text)) => Ok(Some(text)),
            Ok(Outcome::Stopped(text)) => Ok(Some(text).filter(|text| !text.is_empty())),
            Err(error) if is_typed && !error.is::<io::Error>() => {
                self.client.disconnect();
                eprintln!("error: {}", crate::report::sentence(&error));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// The next message; `None` at the end of the input. Ctrl-C ends an input that nobody types, and discards a line.
async fn next(input: &mut Input, interrupts: &mut Interrupts) -> Result<Option<String>> {
    loop {
        let is_typed = input.is_typed();
        let line = tokio::select! {
            line = input.next() => line?,
            // A terminal's line editor reads Ctrl-C as a key.
            _ = interrupts.recv(), if !is_typed => Line::End,
        };
        match line {
            Line::Text(text) => return Ok(Some(text)),
            Line::Interrupted => eprintln!("(Ctrl-D or /bye exits)"),
            Line::End => return Ok(None),
        }
    }
}

/// Messages and parameters of a saved conversation.
fn saved(text: &str) -> Result<(Vec<Value>, Parameters)> {
    let conversation: Value = serde_json::from_str(text).context("it is not a saved conversation")?;
    let messages = conversation["messages"].as_array().cloned().context("it is not a saved conversation")?;
    let is_message = |message: &Value| {
        message["role"].as_str().is_some_and(|role| ["system", "user", "assistant"].contains(&role))
            && images::is_content(&message["content"])
    };
    ensure!(messages.iter().all(is_message), "it has a message without a role or a content");
    let parameters = Parameters::of_saved(&conversation["parameters"]).map_err(anyhow::Error::msg)?;
    Ok((messages, parameters))
}

/// The text of a file that has up to `limit` bytes.
fn read_text(path: &str, limit: u64) -> Result<String> {
    let named = || path.to_owned();
    let mut text = String::new();
    let file = File::open(expanded(path)).with_context(named)?;
    file.take(limit + 1).read_to_string(&mut text).with_context(named)?;
    ensure!(text.len() as u64 <= limit, "{path} has more than {limit} bytes");
    Ok(text)
}

/// A path, with `~/` as a shell expands it.
pub(crate) fn expanded(path: &str) -> PathBuf {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    match (path.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => path.into(),
    }
}
