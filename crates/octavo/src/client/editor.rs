//! Lines from a terminal, with editing and a history.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::Validator;
use rustyline::{Behavior, CompletionType, Config, Context, Editor, Helper};

use crate::client::terminal::{Line, Reader};
use crate::client::{command, parameters};

/// Entries that the history keeps.
const HISTORY_SIZE: usize = 1000;

/// A line editor on the terminal.
pub(crate) struct LineEditor {
    editor: Editor<Commands, DefaultHistory>,
    /// The history file; `None` keeps the history in memory.
    file: Option<PathBuf>,
}

impl LineEditor {
    /// An editor that keeps its history in `file`. A file that cannot be used is reported once and left alone.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub(crate) fn new(file: Option<PathBuf>) -> io::Result<Self> {
        let config = Config::builder().max_history_size(HISTORY_SIZE).map_err(to_io)?;
        // The terminal itself, because stdout may be a file for the answers.
        let config = config.auto_add_history(false).behavior(Behavior::PreferTerm);
        let config = config.completion_type(CompletionType::List).build();
        let mut editor = Editor::with_config(config).map_err(to_io)?;
        editor.set_helper(Some(Commands));
        let file = file.filter(|file| match private(file).and_then(|()| editor.load_history(file).map_err(to_io)) {
            Ok(()) => true,
            Err(error) => {
                eprintln!("the history is not kept: {}: {error}", file.display());
                false
            }
        });
        Ok(Self { editor, file })
    }
}

impl Reader for LineEditor {
    fn read(&mut self, prompt: &str) -> io::Result<Line> {
        match self.editor.readline(prompt) {
            Ok(line) => Ok(Line::Text(line)),
            Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(error) => Err(to_io(error)),
        }
    }

    fn remember(&mut self, entry: &str) {
        let is_new = self.editor.add_history_entry(entry).unwrap_or(false);
        if let Some(file) = self.file.as_ref().filter(|_| is_new)
            && let Err(error) = self.editor.append_history(file)
        {
            eprintln!("the history is not kept: {}: {error}", file.display());
            self.file = None;
        }
    }
}

/// `$XDG_STATE_HOME/octavo/history`, or `~/.local/state/octavo/history`.
pub(crate) fn history_file() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")))?;
    Some(state.join("octavo/history"))
}

/// Creates the file if necessary, and lets only its owner read it.
fn private(path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    file.set_permissions(PermissionsExt::from_mode(0o600))
}

fn to_io(error: ReadlineError) -> io::Error {
    match error {
        ReadlineError::Io(error) => error,
        error => io::Error::other(error),
    }
}

/// Completes commands and the names of parameters.
struct Commands;

impl Completer for Commands {
    type Candidate = String;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(completions(&line[..pos]))
    }
}

impl Helper for Commands {}
impl Highlighter for Commands {}
impl Validator for Commands {}
impl Hinter for Commands {
    type Hint = String;
}

/// The start of the last word of `text`, and its completions.
fn completions(text: &str) -> (usize, Vec<String>) {
    let beginning = |from: usize, names: &mut dyn Iterator<Item = &'static str>| {
        let word = &text[from..];
        (from, names.filter(|name| name.starts_with(word)).map(|name| format!("{name} ")).collect())
    };
    match text.strip_prefix("/set ") {
        Some(rest) if !rest.contains(' ') => beginning(text.len() - rest.len(), &mut parameters::names()),
        None if text.starts_with('/') && !text.contains(' ') => beginning(0, &mut command::NAMES.into_iter()),
        _ => (text.len(), vec![]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_parameters_are_completed() {
        assert_eq!(completions("/s"), (0, vec!["/set ".into(), "/system ".into(), "/save ".into()]));
        assert_eq!(completions("/set top"), (5, vec!["top_p ".into(), "top_k ".into()]));
        assert_eq!(completions("/set top_k 3"), (12, vec![]));
        assert_eq!(completions("/load /t"), (8, vec![]));
        assert_eq!(completions("hello"), (5, vec![]));
    }

    #[test]
    fn the_history_is_for_its_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/octavo/history");
        private(&path).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        private(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
}
