//! Bound on intersected patterns.
//!
//! llguidance decides with derivatives of expressions whether a text can still match. The derivative of an intersection
//! has a branch for every combination of its operands' branches, and neither the fuel nor a time limit interrupts one
//! derivative: 30 operands of two branches each are a billion. An upper bound of the branches is therefore computed
//! before the lexer is built.

use llguidance::derivre::raw::ExprSet;
use llguidance::derivre::{ExprRef, RegexBuilder};
use llguidance::earley::lexerspec::LexerSpec;

/// The bytes with which the texts of an expression may begin.
type Bytes = [u64; 4];

const ALL: Bytes = [u64::MAX; 4];

/// The name of the variant of intersections.
const INTERSECTION: &str = "And";

/// How an expression branches. A branch is a part of a derivative; branches count together if the same byte takes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Branches {
    first: Bytes,
    /// Number for the first byte of a text.
    initial: u64,
    /// Maximum number for any byte after one branch was taken, or for the first.
    any: u64,
    /// No text is the beginning of another one, and there is one branch for every byte. Such an expression ends all its
    /// branches at the same time, so those of what follows do not add up.
    aligned: bool,
}

/// Returns an upper bound for the number of branches of an intersection by one byte: 1 without intersections.
pub(super) fn branches(lexer: &LexerSpec) -> u64 {
    let mut most = 1;
    Branches::all(lexer.regex_builder.exprset(), |kind, branches| {
        if kind == INTERSECTION {
            most = most.max(branches.any);
        }
    });
    most
}

/// Returns an upper bound for the number of branches of a pattern of a JSON schema by one byte. A pattern that is
/// invalid has as many as bytes.
pub(super) fn branches_of(pattern: &str) -> u64 {
    let mut builder = RegexBuilder::new();
    match builder.mk_regex_for_serach(pattern) {
        Ok(expr) => Branches::all(builder.exprset(), |_, _| {})[expr.as_usize()].any,
        Err(_) => pattern.len().max(1) as u64,
    }
}

impl Branches {
    /// Returns the branches of every expression, by its number. `visit` gets each with the name of its kind.
    fn all(exprs: &ExprSet, mut visit: impl FnMut(&str, &Self)) -> Vec<Self> {
        // Operands are created before the expressions that have them. The first expression is a placeholder.
        let mut known = vec![Self::default(); exprs.len()];
        for id in 1..exprs.len() {
            let expr = ExprRef::new(id as u32);
            let kind = format!("{:?}", exprs.get_tag(expr));
            known[id] = Self::from_expr(exprs, expr, &kind, &known);
            visit(&kind, &known[id]);
        }
        known
    }

    /// `kind` is the name of the expression's variant in `derivre`, which does not export the type.
    fn from_expr(exprs: &ExprSet, expr: ExprRef, kind: &str, known: &[Self]) -> Self {
        let mut operands = exprs.get_args(expr).iter().map(|operand| known[operand.as_usize()]);
        match kind {
            "Concat" => match (exprs.get_args(expr), operands.next(), operands.next()) {
                (&[head, _], Some(before), Some(after)) => before.then(after, exprs.is_nullable(head)),
                _ => Self::UNKNOWN,
            },
            "Or" => {
                let nullable = exprs.get_args(expr).iter().any(|operand| exprs.is_nullable(*operand));
                let union = operands.fold(Self { aligned: true, ..Self::default() }, Self::or);
                Self { aligned: union.aligned && !nullable, ..union }
            }
            INTERSECTION => operands.fold(Self::ONE, Self::and),
            // The branches of a complement exclude each other.
            "Not" => Self::ONE,
            "Repeat" => operands.next().map_or(Self::UNKNOWN, Self::repeated),
            "Lookahead" => operands.next().map_or(Self::UNKNOWN, |inner| Self { aligned: false, ..inner }),
            "ByteConcat" => {
                let after = operands.next().unwrap_or(Self::UNKNOWN);
                Self { first: first(exprs, expr), any: after.any.max(1), aligned: after.aligned, ..Self::ONE }
            }
            "RemainderIs" => Self::ONE,
            "EmptyString" | "NoMatch" | "Byte" | "ByteSet" => {
                Self { first: first(exprs, expr), aligned: true, ..Self::ONE }
            }
            _ => Self::UNKNOWN,
        }
    }

    /// An expression about which nothing is known.
    const UNKNOWN: Self = Self { first: ALL, initial: u64::MAX, any: u64::MAX, aligned: false };

    /// An expression with one branch for every byte.
    const ONE: Self = Self { first: ALL, initial: 1, any: 1, aligned: false };

    /// Both in a row.
    fn then(self, after: Self, nullable: bool) -> Self {
        let initial = match nullable {
            true if self.excludes(&after) => self.initial.max(after.initial),
            true => self.initial.saturating_add(after.initial),
            false => self.initial,
        };
        let both = if self.aligned { self.any } else { self.any.saturating_add(after.initial) };
        Self {
            first: if nullable { join(self.first, after.first) } else { self.first },
            initial,
            any: both.max(after.any).max(initial),
            aligned: self.aligned && after.aligned,
        }
    }

    fn or(self, other: Self) -> Self {
        let excludes = self.excludes(&other);
        let initial =
            if excludes { self.initial.max(other.initial) } else { self.initial.saturating_add(other.initial) };
        Self {
            first: join(self.first, other.first),
            initial,
            any: initial.max(self.any).max(other.any),
            aligned: excludes && self.aligned && other.aligned,
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            first: std::array::from_fn(|word| self.first[word] & other.first[word]),
            initial: self.initial.saturating_mul(other.initial),
            any: self.any.saturating_mul(other.any),
            aligned: false,
        }
    }

    fn repeated(self) -> Self {
        let again = if self.aligned { 0 } else { self.initial };
        Self { any: self.any.saturating_add(again), aligned: false, ..self }
    }

    /// Whether no byte begins texts of both.
    fn excludes(&self, other: &Self) -> bool {
        self.first.iter().zip(other.first).all(|(left, right)| left & right == 0)
    }
}

fn join(left: Bytes, right: Bytes) -> Bytes {
    std::array::from_fn(|word| left[word] | right[word])
}

/// Returns the first bytes of an expression that begins with a byte or with a set of bytes.
fn first(exprs: &ExprSet, expr: ExprRef) -> Bytes {
    let expr = exprs.get(expr);
    let mut first = Bytes::default();
    for byte in (0..=u8::MAX).filter(|byte| !expr.surely_no_match(*byte)) {
        first[usize::from(byte / 64)] |= 1 << (byte % 64);
    }
    first
}

#[cfg(test)]
mod tests {
    use llguidance::derivre::RegexAst;

    use super::*;

    /// The bound for an intersection of regexes.
    fn bound(regexes: &[&str]) -> u64 {
        let mut lexer = LexerSpec::new().unwrap();
        let parts = regexes.iter().map(|regex| RegexAst::Regex((*regex).to_owned())).collect();
        lexer.regex_builder.mk(&RegexAst::And(parts)).unwrap();
        branches(&lexer)
    }

    #[test]
    fn operands_with_one_branch_multiply_nothing() {
        assert_eq!(bound(&["[a-z]+", ".{3,500}"]), 1);
        assert_eq!(bound(&["(ab|cd|ef)*", "[^a]*", "..(x|y)?"]), 1);
        assert_eq!(bound(&[r"(?s:.)*", r"[\p{L}]*"]), 1, "the bytes of letters exclude each other");
    }

    #[test]
    fn branches_by_the_same_byte_multiply() {
        assert_eq!(bound(&[".*a", ".*b"]), 4);
        assert_eq!(bound(&[".*a.{40}b.*", ".*c.{40}d.*", ".*e"]), 8);
        let many: Vec<_> = (0..30).map(|count| format!(".*a.{{{count}}}b.*")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert!(bound(&many) >= 1 << 30);
        assert!(bound(&["(a|a.|a..|.a)*b", ".*c"]) > 8);
    }

    #[test]
    fn a_pattern_alone_is_no_intersection() {
        let mut lexer = LexerSpec::new().unwrap();
        lexer.regex_builder.mk(&RegexAst::Regex("(a|a.|a..)*.*b".to_owned())).unwrap();
        assert_eq!(branches(&lexer), 1);
    }

    /// A kind that is not known by name would make every grammar with it too large.
    #[test]
    fn every_kind_of_expression_is_known() {
        let mut lexer = LexerSpec::new().unwrap();
        let parts = ["a?", "(b|[cd])*e", "(f|[gh]i)+"].map(|regex| RegexAst::Regex(regex.to_owned()));
        let [first, second, third] = parts;
        let parts = vec![
            RegexAst::Not(Box::new(first)),
            RegexAst::LookAhead(Box::new(second)),
            RegexAst::Concat(vec![third, RegexAst::EmptyString]),
            RegexAst::MultipleOf(7, 0),
        ];
        lexer.regex_builder.mk(&RegexAst::Or(parts)).unwrap();
        let exprs = lexer.regex_builder.exprset();
        Branches::all(exprs, |kind, branches| assert_ne!(*branches, Branches::UNKNOWN, "{kind}"));
    }
}
