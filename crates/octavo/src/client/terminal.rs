//! Lines that come in, and text that goes out.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Read, Stdout, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::client::connection::Piece;
use crate::client::editor::LineEditor;

/// Bytes of a message that is piped in.
const MAX_PIPED: u64 = 16 << 20;

/// Begins and ends a message of several lines.
const FENCE: &str = "\"\"\"";

/// A line from a terminal, or why there is none.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// Without its line break.
    Text(String),
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D, or the end of the input.
    End,
}

/// Lines of a terminal.
pub(crate) trait Reader: Send {
    /// Shows `prompt` and waits for a line.
    ///
    /// # Errors
    /// The terminal cannot be used.
    fn read(&mut self, prompt: &str) -> io::Result<Line>;

    /// Adds an entry to the history.
    fn remember(&mut self, _entry: &str) {}
}

/// Where messages come from.
pub(crate) enum Input {
    /// These, and no more.
    Given(VecDeque<String>),
    /// All of standard input is one message, with this text after it.
    Piped(Option<String>),
    /// A person types; `None` while a thread waits for a line.
    Typed(Option<Box<dyn Reader>>),
}

impl Input {
    /// The one message of a flag, a pipe's content, or a terminal's lines.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub(crate) fn new(message: Option<String>, history: Option<PathBuf>) -> Result<Self> {
        Ok(match message {
            Some(message) => Self::Given([message].into()),
            None if io::stdin().is_terminal() => Self::Typed(Some(Box::new(LineEditor::new(history)?))),
            None => Self::Piped(None),
        })
    }

    /// The message `prompt` with a pipe's content in front of it.
    pub(crate) fn with_piped(prompt: String) -> Self {
        match io::stdin().is_terminal() {
            true => Self::Given([prompt].into()),
            false => Self::Piped(Some(prompt)),
        }
    }

    /// Whether a person sits at it.
    pub(crate) fn is_typed(&self) -> bool {
        matches!(self, Self::Typed(_))
    }

    /// Prints the name of the model, if a person types.
    pub(crate) fn greet(&self, text: &str) {
        if self.is_typed() {
            eprintln!("{text}");
        }
    }

    /// The next message.
    ///
    /// # Errors
    /// Standard input or the terminal cannot be read.
    pub(crate) async fn next(&mut self) -> Result<Line> {
        match self {
            Self::Given(messages) => Ok(messages.pop_front().map_or(Line::End, Line::Text)),
            Self::Piped(prompt) => {
                let prompt = prompt.take();
                let piped = tokio::task::spawn_blocking(piped).await??;
                *self = Self::Given(VecDeque::new());
                let message = match prompt {
                    Some(prompt) if piped.is_empty() => prompt,
                    Some(prompt) => format!("{piped}\n\n{prompt}"),
                    None => piped,
                };
                Ok(if message.is_empty() { Line::End } else { Line::Text(message) })
            }
            Self::Typed(reader) => {
                let mut own = reader.take().context("the terminal is being read already")?;
                // Only this thread waits for the person.
                let (own, line) = tokio::task::spawn_blocking(move || {
                    let line = message(own.as_mut());
                    (own, line)
                })
                .await?;
                *reader = Some(own);
                Ok(line?)
            }
        }
    }
}

/// A message of one line, or of several between fences.
fn message(reader: &mut dyn Reader) -> io::Result<Line> {
    let mut entry = match reader.read(">>> ")? {
        Line::Text(entry) => entry,
        other => return Ok(other),
    };
    let Some(begin) = entry.strip_prefix(FENCE).map(|_| FENCE.len()) else {
        if !entry.trim().is_empty() {
            reader.remember(&entry);
        }
        return Ok(Line::Text(entry));
    };
    let end = loop {
        if let Some(end) = entry[begin..].find(FENCE) {
            break begin + end;
        }
        match reader.read("... ")? {
            Line::Text(line) => {
                entry.push('\n');
                entry.push_str(&line);
            }
            other => return Ok(other),
        }
    };
    reader.remember(&entry);
    Ok(Line::Text(entry[begin..end].trim_matches('\n').to_owned()))
}

fn piped() -> Result<String> {
    let mut text = String::new();
    io::stdin().lock().take(MAX_PIPED + 1).read_to_string(&mut text)?;
    ensure!(text.len() as u64 <= MAX_PIPED, "standard input has more than {MAX_PIPED} bytes");
    text.truncate(text.trim_end_matches(['\r', '\n']).len());
    Ok(text)
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

    /// Lines that were typed, and the history.
    struct Script(VecDeque<&'static str>, Vec<String>);

    impl Reader for Script {
        fn read(&mut self, _: &str) -> io::Result<Line> {
            Ok(match self.0.pop_front() {
                Some("^C") => Line::Interrupted,
                Some(line) => Line::Text(line.to_owned()),
                None => Line::End,
            })
        }

        fn remember(&mut self, entry: &str) {
            self.1.push(entry.to_owned());
        }
    }

    #[test]
    fn fences_make_several_lines_one_message() {
        let lines =
            ["one", "", "\"\"\"", "two", " three", "\"\"\"", "\"\"\"four\"\"\"", "\"\"\"five", "^C", "^C", "\"\"\"six"];
        let mut script = Script(lines.into(), vec![]);
        let text = |text: &str| Line::Text(text.to_owned());
        let expected = [text("one"), text(""), text("two\n three"), text("four"), Line::Interrupted, Line::Interrupted];
        for line in expected {
            assert_eq!(message(&mut script).unwrap(), line);
        }
        assert_eq!(message(&mut script).unwrap(), Line::End);
        assert_eq!(script.1, ["one", "\"\"\"\ntwo\n three\n\"\"\"", "\"\"\"four\"\"\""]);
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
