//! Lines of the chat: a message, or a command that begins with `/`.

/// A line that was typed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command<'a> {
    /// Text for the model.
    Message(&'a str),
    /// Shows all parameters.
    Show,
    /// Sets a parameter.
    Set {
        name: &'a str,
        value: &'a str,
    },
    /// Shows the system prompt.
    ShowSystem,
    /// Replaces the system prompt; empty removes it.
    System(&'a str),
    /// Forgets the conversation.
    Clear,
    /// Continues a saved conversation.
    Load(&'a str),
    /// Puts a file's text in front of the next message.
    Read(&'a str),
    /// Adds an image, a file or a URL, to the next message; empty removes those that were added.
    Image(&'a str),
    /// Writes the conversation to a file.
    Save(&'a str),
    Help,
    Bye,
    /// Not a command: a sentence for the user.
    Wrong(String),
}

/// Every command, for completion.
pub(crate) const NAMES: [&str; 9] = ["/set", "/system", "/clear", "/load", "/read", "/image", "/save", "/help", "/bye"];

/// The text of `/help`.
pub(crate) const HELP: &str = "\
Commands:
  /set                 Show the sampling parameters
  /set NAME VALUE      Set a sampling parameter, such as temperature 0.5
  /set NAME default    Leave a sampling parameter to the model
  /system              Show the system prompt
  /system TEXT         Replace the system prompt ('/system \"\"' removes it)
  /clear               Forget the conversation
  /read FILE           Put the text of a file in front of the next message
  /image FILE          Add an image to the next message; a URL is one, too
  /image \"\"            Remove the images from the next message
  /save FILE           Save the conversation as JSON
  /load FILE           Continue a saved conversation
  /help                Show this help
  /bye                 Exit (also Ctrl-D)

Keys:
  \"\"\"                  Begin and end a message of several lines
  Ctrl-C               Stop an answer, or discard the line
  Up, Down, Ctrl-R     Search the history
  Space, then /        Send a message that begins with /
";

impl<'a> Command<'a> {
    /// Reads a line.
    pub(crate) fn parse(line: &'a str) -> Self {
        if !line.starts_with('/') {
            return Self::Message(line);
        }
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let path = |command: fn(&'a str) -> Self, usage: &str| match rest {
            "" => Self::Wrong(format!("a file is missing: {usage}")),
            path => command(path),
        };
        match name {
            "/set" => Self::parse_set(rest),
            "/system" if rest.is_empty() => Self::ShowSystem,
            "/system" => Self::System(rest.trim_matches('"')),
            // `/reset` is the older name.
            "/clear" | "/reset" => Self::Clear,
            "/load" => path(Self::Load, "/load FILE"),
            "/read" => path(Self::Read, "/read FILE"),
            "/image" => path(|source| Self::Image(source.trim_matches('"')), "/image FILE"),
            "/save" => path(Self::Save, "/save FILE"),
            "/help" | "/?" => Self::Help,
            "/bye" | "/exit" | "/quit" => Self::Bye,
            _ => Self::Wrong(format!("there is no command {name}; /help lists the commands")),
        }
    }

    fn parse_set(rest: &'a str) -> Self {
        let words = |text: &'a str| text.split_once(char::is_whitespace).map(|(name, rest)| (name, rest.trim()));
        match words(rest) {
            // As Ollama spells it.
            Some(("parameter", rest)) => Self::parse_set(rest),
            Some(("system", text)) => Self::System(text.trim_matches('"')),
            Some((name, value)) => Self::Set { name, value },
            None if rest.is_empty() => Self::Show,
            None => Self::Wrong(format!("a value is missing: /set {rest} VALUE")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_or_commands() {
        for (line, expected) in [
            ("hello", Command::Message("hello")),
            (" /set", Command::Message(" /set")),
            ("/set", Command::Show),
            ("/set  temperature  0.5 ", Command::Set { name: "temperature", value: "0.5" }),
            ("/set parameter top_k 3", Command::Set { name: "top_k", value: "3" }),
            ("/set system be brief", Command::System("be brief")),
            ("/set stop a b", Command::Set { name: "stop", value: "a b" }),
            ("/system", Command::ShowSystem),
            ("/system You are  a cat.", Command::System("You are  a cat.")),
            ("/system \"\"", Command::System("")),
            ("/reset", Command::Clear),
            ("/load a b.json", Command::Load("a b.json")),
            ("/read x", Command::Read("x")),
            ("/save x", Command::Save("x")),
            ("/image a b.png", Command::Image("a b.png")),
            ("/image \"\"", Command::Image("")),
            ("/?", Command::Help),
            ("/exit", Command::Bye),
        ] {
            assert_eq!(Command::parse(line), expected, "{line}");
        }
        for (line, part) in [("/nope x", "/nope"), ("/set top_k", "/set top_k VALUE"), ("/image", "/image FILE")] {
            let Command::Wrong(text) = Command::parse(line) else { panic!("{line}") };
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn the_help_names_every_command() {
        for name in NAMES {
            assert!(HELP.contains(&format!("\n  {name} ")), "{name}");
        }
    }
}
