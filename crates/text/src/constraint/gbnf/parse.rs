//! Parser of EBNF.

use std::collections::HashMap;
use std::fmt::Write;

use super::super::GrammarError;
use super::Expr;

/// The rules of a grammar.
#[derive(Debug, Default)]
pub(super) struct Rules {
    /// Bodies by index; `None` if the rule is named but not defined.
    pub(super) bodies: Vec<Option<Expr>>,
    pub(super) names: Vec<String>,
    indices: HashMap<String, usize>,
}

impl Rules {
    fn index(&mut self, name: &str) -> usize {
        if let Some(&index) = self.indices.get(name) {
            return index;
        }
        let index = self.names.len();
        self.indices.insert(name.to_owned(), index);
        self.names.push(name.to_owned());
        self.bodies.push(None);
        index
    }

    pub(super) fn root(&self) -> Option<usize> {
        self.indices.get("root").copied()
    }
}

/// Parses a grammar. `depth` limits the nesting of groups.
pub(super) fn parse(text: &str, depth: usize) -> Result<Rules, GrammarError> {
    let mut parser = Parser { text, at: 0, depth, limit: depth, rules: Rules::default() };
    parser.skip_space();
    while parser.at < text.len() {
        let name = parser.name().ok_or_else(|| parser.error("a rule name is expected"))?;
        parser.skip_space();
        if !parser.take("::=") {
            return Err(parser.error("\"::=\" is expected"));
        }
        let body = parser.choice()?;
        let index = parser.rules.index(name);
        if parser.rules.bodies[index].replace(body).is_some() {
            return Err(parser.error(&format!("the rule \"{name}\" is defined twice")));
        }
    }
    Ok(parser.rules)
}

struct Parser<'t> {
    text: &'t str,
    /// Position in bytes.
    at: usize,
    /// Number of groups that may still be opened.
    depth: usize,
    limit: usize,
    rules: Rules,
}

impl<'t> Parser<'t> {
    fn error(&self, message: &str) -> GrammarError {
        let before = &self.text[..self.at];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |last| last.chars().count()) + 1;
        GrammarError::Grammar(format!("{message} at line {line}, column {column}"))
    }

    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let character = self.peek()?;
        self.at += character.len_utf8();
        Some(character)
    }

    fn take(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    /// Skips whitespace and comments.
    fn skip_space(&mut self) {
        loop {
            let rest = self.rest();
            let trimmed = rest.trim_start();
            self.at += rest.len() - trimmed.len();
            if !trimmed.starts_with('#') {
                return;
            }
            self.at += trimmed.find('\n').unwrap_or(trimmed.len());
        }
    }

    fn name(&mut self) -> Option<&'t str> {
        let rest = self.rest();
        let length =
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))).unwrap_or(rest.len());
        // A name contains no dot: `a .` is a name and any character.
        let name = rest[..length].split('.').next().filter(|name| !name.is_empty())?;
        self.at += name.len();
        Some(name)
    }

    /// Returns whether the next rule starts here.
    fn at_rule(&mut self) -> bool {
        let at = self.at;
        let found = self.name().is_some() && {
            self.skip_space();
            self.rest().starts_with("::=")
        };
        self.at = at;
        found
    }

    fn choice(&mut self) -> Result<Expr, GrammarError> {
        let mut options = vec![self.sequence()?];
        while self.take("|") {
            options.push(self.sequence()?);
        }
        Ok(if options.len() == 1 { options.swap_remove(0) } else { Expr::Choice(options) })
    }

    /// Parses up to a bar, a closing parenthesis, the next rule or the end, including the whitespace after it.
    fn sequence(&mut self) -> Result<Expr, GrammarError> {
        let mut items = Vec::new();
        loop {
            self.skip_space();
            if matches!(self.peek(), None | Some('|' | ')')) || self.at_rule() {
                return Ok(if items.len() == 1 { items.swap_remove(0) } else { Expr::Sequence(items) });
            }
            let item = self.atom()?;
            items.push(self.repeated(item)?);
        }
    }

    fn atom(&mut self) -> Result<Expr, GrammarError> {
        match self.peek() {
            Some(quote @ ('"' | '\'')) => self.literal(quote).map(Expr::Literal),
            Some('[') => self.class().map(Expr::Class),
            Some('(') => {
                self.next();
                self.depth =
                    self.depth.checked_sub(1).ok_or(GrammarError::TooDeep { what: "grammar", limit: self.limit })?;
                let inner = self.choice()?;
                self.depth += 1;
                if !self.take(")") {
                    return Err(self.error("\")\" is expected"));
                }
                Ok(inner)
            }
            Some('.') => {
                self.next();
                Ok(Expr::Class("(?s:.)".to_owned()))
            }
            _ => {
                let name =
                    self.name().ok_or_else(|| self.error("text, a character class, a rule or a group is expected"))?;
                Ok(Expr::Rule(self.rules.index(name)))
            }
        }
    }

    /// Parses the operators after `item`. More than a few make no sense.
    fn repeated(&mut self, mut item: Expr) -> Result<Expr, GrammarError> {
        for _ in 0..4 {
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    let (min, max) = self.range()?;
                    item = Expr::Repeat(Box::new(item), min, max);
                    continue;
                }
                _ => return Ok(item),
            };
            self.next();
            item = Expr::Repeat(Box::new(item), min, max);
        }
        Err(self.error("there are too many repetition signs"))
    }

    /// Parses `{2}`, `{2,}`, `{,3}` or `{2,3}`.
    fn range(&mut self) -> Result<(u32, Option<u32>), GrammarError> {
        const MOST: u32 = 100_000;
        let end = self.rest().find('}').ok_or_else(|| self.error("\"}\" is expected"))?;
        let range = &self.rest()[1..end];
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|&count| count <= MOST);
        let parsed = match range.split_once(',') {
            None => number(range).map(|count| (count, Some(count))),
            Some((min, max)) => {
                let min = if min.trim().is_empty() { Some(0) } else { number(min) };
                let max = if max.trim().is_empty() { Some(None) } else { number(max).map(Some) };
                min.zip(max).filter(|&(min, max)| max.is_none_or(|max| max >= min))
            }
        };
        let parsed =
            parsed.ok_or_else(|| self.error(&format!("a repetition like {{1,3}} is expected, of at most {MOST}")))?;
        self.at += end + 1;
        Ok(parsed)
    }

    fn literal(&mut self, quote: char) -> Result<String, GrammarError> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                Some(character) if character == quote => return Ok(text),
                Some('\\') => text.push(self.escape()?),
                Some(character) if character != '\n' => text.push(character),
                _ => return Err(self.error("a text does not end on its line")),
            }
        }
    }

    fn class(&mut self) -> Result<String, GrammarError> {
        self.next();
        let negated = self.take("^");
        let mut regex = String::from(if negated { "[^" } else { "[" });
        let mut is_empty = true;
        while !self.take("]") {
            let first = self.class_character()?;
            let is_range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let last = if is_range {
                self.next();
                self.class_character()?
            } else {
                first
            };
            if last < first {
                return Err(self.error("a range of characters runs backwards"));
            }
            // Writing to a `String` cannot fail.
            let _ = write!(regex, "\\x{{{:X}}}-\\x{{{:X}}}", first as u32, last as u32);
            is_empty = false;
        }
        regex.push(']');
        match (is_empty, negated) {
            (false, _) => Ok(regex),
            (true, true) => Ok("(?s:.)".to_owned()),
            (true, false) => Err(self.error("a character class is empty")),
        }
    }

    fn class_character(&mut self) -> Result<char, GrammarError> {
        match self.next() {
            Some('\\') => self.escape(),
            Some(character) if character != '\n' => Ok(character),
            _ => Err(self.error("a character class does not end on its line")),
        }
    }

    /// Parses an escape after its backslash.
    fn escape(&mut self) -> Result<char, GrammarError> {
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('f') => return Ok('\u{c}'),
            Some('b') => return Ok('\u{8}'),
            Some('0') => return Ok('\0'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(character) if character.is_ascii_punctuation() => return Ok(character),
            _ => return Err(self.error("an escape is not known")),
        };
        let code = self.rest().get(..digits).and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let character = code.and_then(char::from_u32).ok_or_else(|| self.error("an escape is no character"))?;
        self.at += digits;
        Ok(character)
    }
}
