//! Output of EBNF rules as Lark.

use std::fmt::Write;

use super::super::lower::quoted;
use super::super::{GrammarError, GrammarLimits};
use super::Expr;
use super::parse::Rules;

/// Writes the grammar with these rules.
pub(super) fn write(rules: Rules, limits: &GrammarLimits) -> Result<String, GrammarError> {
    let Some(root) = rules.root() else {
        return Err(GrammarError::Grammar("it has no rule named root".to_owned()));
    };
    let mut bodies = Vec::with_capacity(rules.bodies.len());
    for (index, (body, name)) in rules.bodies.into_iter().zip(&rules.names).enumerate() {
        let Some(body) = body else {
            return Err(GrammarError::Grammar(format!("there is no rule named \"{name}\"")));
        };
        bodies.push(unrolled(index, body));
    }
    let regular = regular_rules(&bodies);
    let mut writer = Writer {
        terminal_of: vec![None; bodies.len()],
        regular,
        out: String::new(),
        terminals: 0,
        helpers: 0,
        limit: limits.grammar_symbols,
    };
    for index in writer.regular.order.clone() {
        let body = writer.terminal(&bodies[index])?;
        writer.terminal_of[index] = Some(body);
    }
    for (index, body) in bodies.iter().enumerate() {
        if !writer.is_regular(&Expr::Rule(index)) {
            let body = writer.body(body)?;
            writer.line(&format!("n{index}"), &body)?;
        }
    }
    let start = writer.term(&Expr::Rule(root))?;
    writer.line("start", &start)?;
    Ok(writer.out)
}

/// Converts a rule that refers to itself only at the end of alternatives to a repetition.
fn unrolled(index: usize, body: Expr) -> Expr {
    let options = match body {
        Expr::Choice(options) => options,
        // This is `("x" rule)?`.
        Expr::Repeat(inner, 0, Some(1)) => match *inner {
            Expr::Choice(mut options) => {
                options.push(Expr::Sequence(Vec::new()));
                options
            }
            inner => vec![inner, Expr::Sequence(Vec::new())],
        },
        body => return body,
    };
    let (mut repeated, mut last) = (Vec::new(), Vec::new());
    for option in &options {
        let mut items = match option {
            Expr::Sequence(items) => items.clone(),
            option => vec![option.clone()],
        };
        if items.last() == Some(&Expr::Rule(index)) {
            items.pop();
            repeated.push(Expr::Sequence(items));
        } else {
            last.push(Expr::Sequence(items));
        }
    }
    let mentions_itself = |expr: &Expr| {
        let mut found = false;
        expr.for_each_rule(&mut |rule| found |= rule == index);
        found
    };
    if repeated.is_empty() || last.is_empty() || repeated.iter().chain(&last).any(mentions_itself) {
        return Expr::Choice(options);
    }
    Expr::Sequence(vec![Expr::Repeat(Box::new(Expr::Choice(repeated)), 0, None), Expr::Choice(last)])
}

impl Expr {
    fn for_each_rule(&self, visit: &mut impl FnMut(usize)) {
        match self {
            Self::Literal(_) | Self::Class(_) => {}
            Self::Rule(rule) => visit(*rule),
            Self::Sequence(parts) | Self::Choice(parts) => parts.iter().for_each(|part| part.for_each_rule(visit)),
            Self::Repeat(part, ..) => part.for_each_rule(visit),
        }
    }
}

struct Regular {
    /// Regular rules, each after those it refers to.
    order: Vec<usize>,
    is: Vec<bool>,
    /// Whether the rule matches the empty text; computed for regular rules only.
    nullable: Vec<bool>,
}

/// Finds the regular rules. A rule is regular if all its rules are, which excludes recursive ones.
fn regular_rules(bodies: &[Expr]) -> Regular {
    let mut mentioned_by: Vec<Vec<usize>> = vec![Vec::new(); bodies.len()];
    let mut open = vec![0_usize; bodies.len()];
    for (index, body) in bodies.iter().enumerate() {
        body.for_each_rule(&mut |rule| {
            mentioned_by[rule].push(index);
            open[index] += 1;
        });
    }
    let mut order: Vec<usize> = (0..bodies.len()).filter(|&index| open[index] == 0).collect();
    let mut regular = Regular { order: Vec::new(), is: vec![false; bodies.len()], nullable: vec![false; bodies.len()] };
    let mut next = 0;
    while let Some(&index) = order.get(next) {
        next += 1;
        regular.is[index] = true;
        regular.nullable[index] = regular.is_nullable(&bodies[index]);
        for &user in &mentioned_by[index] {
            open[user] -= 1;
            if open[user] == 0 {
                order.push(user);
            }
        }
    }
    regular.order = order;
    regular
}

impl Regular {
    fn is_nullable(&self, expr: &Expr) -> bool {
        match expr {
            Expr::Literal(text) => text.is_empty(),
            Expr::Class(_) => false,
            Expr::Rule(rule) => self.nullable[*rule],
            Expr::Sequence(parts) => parts.iter().all(|part| self.is_nullable(part)),
            Expr::Choice(parts) => parts.iter().any(|part| self.is_nullable(part)),
            Expr::Repeat(part, min, _) => *min == 0 || self.is_nullable(part),
        }
    }
}

struct Writer {
    regular: Regular,
    /// Name of the terminal of each regular rule.
    terminal_of: Vec<Option<String>>,
    out: String,
    terminals: usize,
    helpers: usize,
    limit: usize,
}

impl Writer {
    fn is_regular(&self, expr: &Expr) -> bool {
        let mut regular = true;
        expr.for_each_rule(&mut |rule| regular &= self.regular.is[rule]);
        regular
    }

    fn line(&mut self, name: &str, body: &str) -> Result<(), GrammarError> {
        if self.terminals + self.helpers > self.limit {
            return Err(GrammarError::TooLarge { what: "grammar", limit: self.limit });
        }
        // Writing to a `String` cannot fail.
        let _ = writeln!(self.out, "{name}: {body}");
        Ok(())
    }

    /// Writes a terminal and returns its name.
    fn new_terminal(&mut self, body: &str) -> Result<String, GrammarError> {
        let name = format!("T{}", self.terminals);
        self.terminals += 1;
        self.line(&name, body)?;
        Ok(name)
    }

    /// Returns a term for a regular expression inside terminals. Compound expressions get a separate terminal, because
    /// Lark limits the nesting of groups.
    fn terminal(&mut self, expr: &Expr) -> Result<String, GrammarError> {
        let body = match expr {
            Expr::Literal(text) => return Ok(quoted(text)),
            Expr::Class(regex) => return Ok(format!("/{regex}/")),
            Expr::Rule(rule) => return Ok(self.terminal_of[*rule].clone().unwrap_or_default()),
            Expr::Sequence(parts) => {
                let parts = parts.iter().map(|part| self.terminal(part)).collect::<Result<Vec<_>, _>>()?;
                if parts.is_empty() { "\"\"".to_owned() } else { parts.join(" ") }
            }
            Expr::Choice(parts) => {
                parts.iter().map(|part| self.terminal(part)).collect::<Result<Vec<_>, _>>()?.join(" | ")
            }
            Expr::Repeat(_, _, Some(0)) => return Ok("\"\"".to_owned()),
            Expr::Repeat(part, min, max) => format!("{}{}", self.terminal(part)?, repetition(*min, *max)),
        };
        self.new_terminal(&body)
    }

    /// Returns a term for an expression inside rules.
    fn term(&mut self, expr: &Expr) -> Result<String, GrammarError> {
        if self.is_regular(expr) {
            return self.lexeme(expr);
        }
        match expr {
            Expr::Rule(rule) => Ok(format!("n{rule}")),
            Expr::Repeat(_, _, Some(0)) => Ok("\"\"".to_owned()),
            Expr::Repeat(part, min, max) => {
                let part = self.term(part)?;
                // Lark does not allow an operator on an operator.
                let body = if part.ends_with(['?', '*', '+', '}']) { self.helper(&part)? } else { part };
                Ok(format!("{body}{}", repetition(*min, *max)))
            }
            expr => {
                let body = self.body(expr)?;
                self.helper(&body)
            }
        }
    }

    fn helper(&mut self, body: &str) -> Result<String, GrammarError> {
        let name = format!("h{}", self.helpers);
        self.helpers += 1;
        self.line(&name, body)?;
        Ok(name)
    }

    /// Returns the right side of a rule.
    fn body(&mut self, expr: &Expr) -> Result<String, GrammarError> {
        match expr {
            Expr::Choice(options) => {
                let mut written = Vec::with_capacity(options.len());
                let (regular, other): (Vec<&Expr>, Vec<&Expr>) =
                    options.iter().partition(|option| self.is_regular(option));
                if !regular.is_empty() {
                    written.push(self.lexeme(&Expr::Choice(regular.into_iter().cloned().collect()))?);
                }
                for option in other {
                    written.push(self.body(option)?);
                }
                // Nested alternatives are flattened.
                Ok(written.join(" | "))
            }
            Expr::Sequence(items) => {
                let mut written = Vec::new();
                let runs: Vec<&[Expr]> = items.chunk_by(|a, b| self.is_regular(a) && self.is_regular(b)).collect();
                for run in runs {
                    written.push(match run {
                        [item] => self.term(item)?,
                        run => self.lexeme(&Expr::Sequence(run.to_vec()))?,
                    });
                }
                Ok(written.join(" "))
            }
            expr => self.term(expr),
        }
    }

    /// Returns a regular expression as one terminal in a rule. A lexer does not match empty text, so the rule has to
    /// allow that.
    fn lexeme(&mut self, expr: &Expr) -> Result<String, GrammarError> {
        let terminal = self.terminal(expr)?;
        if !self.regular.is_nullable(expr) {
            return Ok(terminal);
        }
        let name = self.new_terminal(&format!("{terminal} & /(?s:.+)/"))?;
        Ok(format!("{name}?"))
    }
}

fn repetition(min: u32, max: Option<u32>) -> String {
    match (min, max) {
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (0, Some(1)) => "?".to_owned(),
        (min, None) => format!("{{{min},}}"),
        (min, Some(max)) => format!("{{{min},{max}}}"),
    }
}
