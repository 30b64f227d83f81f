//! Numbers and labels in Prometheus' text format, formatted as by its Python client.

use std::fmt::Write;

/// Appends a sample value or a bucket bound: `0.0`, `0.001`, `1.0`, `1e+06`, `+Inf`.
pub(crate) fn push_number(out: &mut String, value: f64) {
    // Writing to a String cannot fail.
    let _ = if value.is_nan() {
        write!(out, "NaN")
    } else if value.is_infinite() {
        write!(out, "{}Inf", if value > 0.0 { '+' } else { '-' })
    } else if value.abs() < 1e6 {
        write!(out, "{value:?}")
    } else {
        let text = format!("{value:e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        write!(out, "{mantissa}e+{exponent:0>2}")
    };
}

/// Appends a count as [`push_number`] would.
pub(crate) fn push_count(out: &mut String, value: u64) {
    if value < 1_000_000 {
        out.push_str(itoa::Buffer::new().format(value));
        out.push_str(".0");
    } else {
        push_number(out, value as f64);
    }
}

/// `{a="1",b="2"}` in name order with escaped values; empty without labels.
pub(crate) fn label_set(labels: &[(&str, &str)]) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let mut sorted = labels.to_vec();
    sorted.sort_unstable();
    let mut out = String::from("{");
    for (i, (name, value)) in sorted.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        out.push_str(name);
        out.push_str("=\"");
        push_escaped(&mut out, value);
        out.push('"');
    }
    out.push('}');
    out
}

fn push_escaped(out: &mut String, value: &str) {
    for c in value.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            _ => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spelled_like_the_python_client() {
        let cases = [
            (0.0, "0.0"),
            (1.0, "1.0"),
            (0.001, "0.001"),
            (0.025, "0.025"),
            (7680.0, "7680.0"),
            (999_999.0, "999999.0"),
            (1_000_000.0, "1e+06"),
            (2_500_000.0, "2.5e+06"),
            (1_234_567.25, "1.23456725e+06"),
            (123_456_789_012.0, "1.23456789012e+11"),
            (f64::INFINITY, "+Inf"),
            (f64::NEG_INFINITY, "-Inf"),
            (f64::NAN, "NaN"),
        ];
        for (value, expected) in cases {
            let mut out = String::new();
            push_number(&mut out, value);
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn counts_are_spelled_as_numbers_are() {
        for value in [0, 1, 42, 999_999, 1_000_000, 1_234_567, u64::MAX] {
            let (mut count, mut number) = (String::new(), String::new());
            push_count(&mut count, value);
            push_number(&mut number, value as f64);
            assert_eq!(count, number);
        }
    }

    #[test]
    fn labels_are_sorted_and_escaped() {
        assert_eq!(label_set(&[]), "");
        assert_eq!(label_set(&[("b", "2"), ("a", "x\"y\\z\nw")]), r#"{a="x\"y\\z\nw",b="2"}"#);
    }
}
