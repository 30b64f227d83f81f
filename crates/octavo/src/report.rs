//! Errors, told to a person.

/// An error and its causes as one sentence. A cause that the error before it quotes already is left out: libraries differ in
/// whether a message includes its cause.
pub(crate) fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        assert_eq!(sentence(&anyhow!("c").context("b").context("a")), "a: b: c");
        assert_eq!(sentence(&anyhow!("no such file").context("x: no such file").context("a")), "a: x: no such file");
    }
}
