//! Tables in the terminal.

/// Rows as lines of aligned columns, two spaces apart. The first row is the heading.
pub(crate) fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_end_without_blanks() {
        let rows = [["NAME", "SIZE"], ["a-longer-name", "1 B"], ["é", ""]].map(|row| row.map(str::to_owned));
        assert_eq!(aligned(&rows), "NAME           SIZE\na-longer-name  1 B\né\n");
    }
}
