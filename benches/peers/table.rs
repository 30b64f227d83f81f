//! Tables in Markdown.

use std::fmt;

/// A table with a header.
pub(super) struct Table {
    title: String,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(title: &str, head: &[&str]) -> Self {
        Self { title: title.to_owned(), head: head.iter().map(|&cell| cell.to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row. Missing cells at its end are empty.
    pub(super) fn row(&mut self, mut cells: Vec<String>) {
        cells.resize(self.head.len(), String::new());
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    /// Writes nothing if there are no rows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rows.is_empty() {
            return Ok(());
        }
        writeln!(f, "\n## {}\n", self.title)?;
        line(f, &self.head)?;
        line(f, &vec!["---".to_owned(); self.head.len()])?;
        self.rows.iter().try_for_each(|row| line(f, row))
    }
}

fn line(f: &mut fmt::Formatter<'_>, cells: &[String]) -> fmt::Result {
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    writeln!(f, "| {} |", cells.join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_markdown() {
        let mut table = Table::new("Speed", &["row", "value"]);
        assert_eq!(table.to_string(), "");
        table.row(vec!["a|b".into(), "1".into()]);
        table.row(vec!["c".into()]);
        assert_eq!(table.to_string(), "\n## Speed\n\n| row | value |\n| --- | --- |\n| a\\|b | 1 |\n| c |  |\n");
    }
}
