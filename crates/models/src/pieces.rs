//! Names of the pieces of a split GGUF file: `model-00001-of-00003.gguf`.

use std::ops::RangeInclusive;

/// End of the name of a GGUF file.
const EXTENSION: &str = ".gguf";
/// Number of digits of a number in a name.
const DIGITS: usize = 5;

/// The name of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    /// What all pieces begin with.
    stem: &'a str,
    /// Number of the piece, counted from 1.
    pub(crate) number: usize,
    /// Number of pieces.
    pub(crate) count: usize,
}

impl<'a> Piece<'a> {
    /// Reads the name of a file, with or without folders; `None` if it is not that of a piece.
    pub(crate) fn parse(name: &'a str) -> Option<Self> {
        let number = |text: &str| {
            let is_number = text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten()
        };
        let stem = name.get(..name.len().checked_sub(EXTENSION.len())?)?;
        if !name.get(stem.len()..)?.eq_ignore_ascii_case(EXTENSION) {
            return None;
        }
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (stem, at) = rest.rsplit_once('-')?;
        let (at, count) = (number(at)?, number(count)?);
        (1..=count).contains(&at).then_some(Self { stem, number: at, count })
    }

    /// Returns the names of all pieces, in order.
    pub(crate) fn all(self) -> impl Iterator<Item = String> + use<'a> {
        let Self { stem, count, .. } = self;
        let numbers: RangeInclusive<usize> = 1..=count;
        numbers.map(move |number| format!("{stem}-{number:0DIGITS$}-of-{count:0DIGITS$}{EXTENSION}"))
    }
}

/// Returns the names of the pieces of a GGUF file, or its own.
pub(crate) fn pieces(name: &str) -> Vec<String> {
    Piece::parse(name).map_or_else(|| vec![name.to_owned()], |piece| piece.all().collect())
}

/// Returns the name of the first piece of a GGUF file, or its own.
pub(crate) fn first_piece(name: &str) -> String {
    Piece::parse(name).and_then(|piece| piece.all().next()).unwrap_or_else(|| name.to_owned())
}

/// Returns whether a file is a piece that follows another.
pub(crate) fn follows(name: &str) -> bool {
    Piece::parse(name).is_some_and(|piece| piece.number > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_pieces_are_read_and_written() {
        let piece = Piece::parse("q4/m-Q4_K_M-00002-of-00003.gguf").unwrap();
        assert_eq!((piece.number, piece.count), (2, 3));
        let all =
            ["q4/m-Q4_K_M-00001-of-00003.gguf", "q4/m-Q4_K_M-00002-of-00003.gguf", "q4/m-Q4_K_M-00003-of-00003.gguf"];
        assert_eq!(
            (pieces(all[2]).as_slice(), first_piece(all[1])),
            (all.map(str::to_owned).as_slice(), all[0].to_owned())
        );
        assert_eq!(all.map(follows), [false, true, true]);
        for whole in [
            "m-Q4_K_M.gguf",
            "state-of-the-art.gguf",
            "x.gguf",
            "of-00003.gguf",
            "",
            "é.gguf",
            "m-00000-of-00003.gguf",
            "m-00004-of-00003.gguf",
            "m-00001-of-00003.bin",
            "m-1-of-3.gguf",
        ] {
            assert_eq!(Piece::parse(whole), None, "{whole:?}");
            assert_eq!(pieces(whole), [whole]);
        }
    }
}
