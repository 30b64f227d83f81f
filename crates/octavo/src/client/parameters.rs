//! Sampling parameters of a conversation: given by flags or by `/set`.

use serde_json::{Map, Value};

use crate::cli::RequestArgs;

/// A parameter of a request.
struct Parameter {
    /// Its name in the API.
    name: &'static str,
    /// Its name for Ollama's users, where that differs.
    alias: &'static str,
    takes: Takes,
}

/// The values of a parameter.
enum Takes {
    /// Numbers with these bounds, both included.
    Number(f64, f64),
    /// Numbers above 0 up to this one.
    Positive(f64),
    /// Whole numbers from this one on.
    Whole(i64),
    Text,
}

const PARAMETERS: [Parameter; 10] = [
    Parameter { name: "temperature", alias: "", takes: Takes::Number(0.0, 2.0) },
    Parameter { name: "top_p", alias: "", takes: Takes::Positive(1.0) },
    Parameter { name: "top_k", alias: "", takes: Takes::Whole(-1) },
    Parameter { name: "min_p", alias: "", takes: Takes::Number(0.0, 1.0) },
    Parameter { name: "repetition_penalty", alias: "repeat_penalty", takes: Takes::Positive(f64::MAX) },
    Parameter { name: "presence_penalty", alias: "", takes: Takes::Number(-2.0, 2.0) },
    Parameter { name: "frequency_penalty", alias: "", takes: Takes::Number(-2.0, 2.0) },
    Parameter { name: "max_tokens", alias: "num_predict", takes: Takes::Whole(1) },
    Parameter { name: "seed", alias: "", takes: Takes::Whole(i64::MIN) },
    Parameter { name: "stop", alias: "", takes: Takes::Text },
];

/// The word that gives a parameter back to the model.
pub(crate) const DEFAULT: &str = "default";

/// The names of all parameters.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    PARAMETERS.iter().map(|parameter| parameter.name)
}

/// Reads the value of the parameter `name`.
///
/// # Errors
/// A sentence that says which values there are.
pub(crate) fn value(name: &str, text: &str) -> Result<Value, String> {
    let parameter = find(name)?;
    let number = |is_valid: &dyn Fn(f64) -> bool, range: String| {
        let value = text.parse().ok().filter(|x: &f64| x.is_finite() && is_valid(*x));
        value.map(Value::from).ok_or_else(|| format!("'{text}' is not a number {range}"))
    };
    match parameter.takes {
        Takes::Number(low, high) => number(&|x| (low..=high).contains(&x), format!("from {low} to {high}")),
        Takes::Positive(f64::MAX) => number(&|x| x > 0.0, "above 0".to_owned()),
        Takes::Positive(high) => number(&|x| x > 0.0 && x <= high, format!("above 0 and up to {high}")),
        Takes::Whole(least) => match text.parse::<i64>() {
            Ok(n) if n >= least => Ok(n.into()),
            _ if least == i64::MIN => Err(format!("'{text}' is not a whole number")),
            _ => Err(format!("'{text}' is not a whole number of at least {least}")),
        },
        Takes::Text => Ok(text.into()),
    }
}

fn find(name: &str) -> Result<&'static Parameter, String> {
    let plain = name.replace('-', "_");
    let found = PARAMETERS.iter().find(|parameter| parameter.name == plain || parameter.alias == plain);
    found.ok_or_else(|| {
        let known = names().collect::<Vec<_>>().join(", ");
        format!("there is no parameter '{name}' (known: {known})")
    })
}

/// The parameters that the user chose. Everything else is left to the model.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Parameters(Map<String, Value>);

impl Parameters {
    /// Those of the flags; `seed` is the engine's flag of this name.
    pub(crate) fn new(args: &RequestArgs, seed: Option<u64>) -> Self {
        let given = args.given().map(|(name, value)| (name.to_owned(), value.clone()));
        let seed = seed.map(|seed| ("seed".to_owned(), Value::from(seed.cast_signed())));
        Self(given.chain(seed).collect())
    }

    /// Reads those of a saved conversation.
    ///
    /// # Errors
    /// There is one that requests do not have, or a value that is not one of its own.
    pub(crate) fn of_saved(saved: &Value) -> Result<Self, String> {
        let mut parameters = Self::default();
        for (name, value) in saved.as_object().into_iter().flatten() {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            parameters.set_parameter(name, &text)?;
        }
        Ok(parameters)
    }

    /// Sets a parameter, or gives it back to the model with [`DEFAULT`].
    ///
    /// # Errors
    /// A sentence that says what is wrong with name or value.
    pub(crate) fn set_parameter(&mut self, name: &str, text: &str) -> Result<(), String> {
        let known = find(name)?.name;
        if text == DEFAULT {
            self.0.remove(known);
        } else {
            self.0.insert(known.to_owned(), value(known, text)?);
        }
        Ok(())
    }

    /// Adds them to a request.
    pub(crate) fn add_to(&self, request: &mut Value) {
        for (name, value) in &self.0 {
            request[name] = value.clone();
        }
    }

    /// As JSON, for a file.
    pub(crate) fn to_json(&self) -> Value {
        Value::Object(self.0.clone())
    }

    /// A line for each parameter: its value and its origin. `model` holds the defaults that the server reports.
    pub(crate) fn described(&self, model: &Value) -> String {
        let mut text = String::new();
        for name in names() {
            // The server's name for this one is the checkpoint's.
            let default = &model[if name == "max_tokens" { "max_new_tokens" } else { name }];
            let (value, origin) = match self.0.get(name) {
                Some(value) => (value.to_string(), "set here"),
                None if !default.is_null() => (default.to_string(), "the model's default"),
                None => ("-".to_owned(), "the server's default"),
            };
            text.push_str(&format!("  {name:<20}{value:<10}{origin}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_checked_before_they_are_sent() {
        assert_eq!(value("temperature", "0.5"), Ok(json!(0.5)));
        assert_eq!(value("top-k", "-1"), Ok(json!(-1)));
        assert_eq!(value("stop", "0.5"), Ok(json!("0.5")));
        for (name, text, part) in [
            ("temperature", "hot", "not a number from 0 to 2"),
            ("temperature", "2.1", "from 0 to 2"),
            ("temperature", "NaN", "from 0 to 2"),
            ("top_p", "0", "above 0 and up to 1"),
            ("repetition_penalty", "0", "above 0"),
            ("max_tokens", "0", "at least 1"),
            ("seed", "1.5", "not a whole number"),
            ("colour", "red", "there is no parameter 'colour' (known: temperature, "),
        ] {
            let error = value(name, text).unwrap_err();
            assert!(error.contains(part), "{name} {text}: {error}");
        }
    }

    #[test]
    fn only_what_was_set_is_sent() {
        let mut parameters = Parameters::default();
        let sent = |parameters: &Parameters| {
            let mut request = json!({});
            parameters.add_to(&mut request);
            request
        };
        assert_eq!(sent(&parameters), json!({}));
        parameters.set_parameter("num_predict", "5").unwrap();
        parameters.set_parameter("temperature", "0").unwrap();
        assert_eq!(sent(&parameters), json!({"max_tokens": 5, "temperature": 0.0}));
        assert_eq!(Parameters::of_saved(&parameters.to_json()), Ok(parameters.clone()));
        parameters.set_parameter("temperature", DEFAULT).unwrap();
        assert_eq!(sent(&parameters), json!({"max_tokens": 5}));
        let shown = parameters.described(&json!({"temperature": 0.2, "max_new_tokens": 9}));
        assert!(shown.contains("  temperature         0.2       the model's default\n"), "{shown}");
        assert!(shown.contains("  max_tokens          5         set here\n"), "{shown}");
        assert!(shown.contains("  top_p               -         the server's default\n"), "{shown}");
    }
}
