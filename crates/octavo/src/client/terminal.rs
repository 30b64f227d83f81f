//! Lines that come in, and text that goes out.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Read, Stdout, Write};

use anyhow::{Result, ensure};
use tokio::sync::mpsc;

use crate::client::connection::Piece;

/// Bytes of a message that is piped in.
const MAX_PIPED: u64 = 16 << 20;

/// Where messages come from.
pub(crate) enum Input {
    /// These, and no more.
    Given(VecDeque<String>),
    /// All of standard input is one message.
    Piped,
    /// Lines of a terminal; a thread waits for them.
    Typed(Option<mpsc::Receiver<io::Result<String>>>),
}

impl Input {
    /// The one message of `--quick`, a pipe's content, or a terminal's lines.
    pub(crate) fn new(quick: Option<String>) -> Self {
        match quick {
            Some(message) => Self::Given([message].into()),
            None if io::stdin().is_terminal() => Self::Typed(None),
            None => Self::Piped,
        }
    }

    /// Whether a person sits at it.
    pub(crate) fn is_typed(&self) -> bool {
        matches!(self, Self::Typed(_))
    }

    /// Tells the person whom they talk with.
    pub(crate) fn greet(&self, text: &str) {
        if self.is_typed() {
            eprintln!("{text}");
        }
    }

    /// The next message, without its line break; `None` at the end. May be dropped and called again.
    pub(crate) async fn next(&mut self) -> Result<Option<String>> {
        match self {
            Self::Given(messages) => Ok(messages.pop_front()),
            Self::Piped => {
                let message = tokio::task::spawn_blocking(piped).await??;
                *self = Self::Given(VecDeque::new());
                Ok(Some(message).filter(|message| !message.is_empty()))
            }
            Self::Typed(lines) => {
                eprint!("> ");
                match lines.get_or_insert_with(typed).recv().await {
                    Some(line) => Ok(Some(line?)),
                    None => Ok(None),
                }
            }
        }
    }
}

fn piped() -> Result<String> {
    let mut text = String::new();
    io::stdin().lock().take(MAX_PIPED + 1).read_to_string(&mut text)?;
    ensure!(text.len() as u64 <= MAX_PIPED, "standard input has more than {MAX_PIPED} bytes");
    text.truncate(text.trim_end_matches(['\r', '\n']).len());
    Ok(text)
}

fn typed() -> mpsc::Receiver<io::Result<String>> {
    let (send, lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in io::stdin().lines() {
            if send.blocking_send(line).is_err() {
                return;
            }
        }
    });
    lines
}

/// Where answers go.
pub(crate) struct Screen<W> {
    out: W,
    /// A person looks at it: reasoning is shown, and nothing a model writes steers the terminal.
    is_terminal: bool,
    in_reasoning: bool,
}

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

impl Screen<Stdout> {
    pub(crate) fn stdout() -> Self {
        Self { is_terminal: io::stdout().is_terminal(), out: io::stdout(), in_reasoning: false }
    }
}

impl<W: Write> Screen<W> {
    #[cfg(test)]
    pub(crate) fn new(out: W, is_terminal: bool) -> Self {
        Self { out, is_terminal, in_reasoning: false }
    }

    /// Shows a piece at once.
    pub(crate) fn piece(&mut self, piece: Piece<'_>) -> io::Result<()> {
        let text = match piece {
            Piece::Content(text) => text,
            Piece::Reasoning(_) if !self.is_terminal => return Ok(()),
            Piece::Reasoning(text) => text,
        };
        self.mode(matches!(piece, Piece::Reasoning(_)))?;
        if self.is_terminal {
            let harmless: String = text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect();
            self.out.write_all(harmless.as_bytes())?;
        } else {
            self.out.write_all(text.as_bytes())?;
        }
        self.out.flush()
    }

    /// Ends an answer.
    pub(crate) fn end(&mut self, stopped: bool) -> io::Result<()> {
        self.mode(false)?;
        self.out.write_all(if stopped && self.is_terminal { b" [stopped]\n" } else { b"\n" })?;
        self.out.flush()
    }

    fn mode(&mut self, in_reasoning: bool) -> io::Result<()> {
        if self.in_reasoning != in_reasoning {
            self.in_reasoning = in_reasoning;
            self.out.write_all(if in_reasoning { DIM } else { PLAIN }.as_bytes())?;
            if !in_reasoning {
                self.out.write_all(b"\n")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(is_terminal: bool) -> String {
        let mut screen = Screen::new(vec![], is_terminal);
        screen.piece(Piece::Reasoning("hm")).unwrap();
        screen.piece(Piece::Content("a\x1b]0;title\x07b\n")).unwrap();
        screen.end(true).unwrap();
        String::from_utf8(screen.out).unwrap()
    }

    #[test]
    fn a_terminal_sees_reasoning_and_no_control_characters() {
        assert_eq!(shown(true), "\x1b[2mhm\x1b[0m\na]0;titleb\n [stopped]\n");
    }

    #[test]
    fn a_pipe_gets_the_answer_alone() {
        assert_eq!(shown(false), "a\x1b]0;title\x07b\n\n");
    }
}
