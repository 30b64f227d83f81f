//! The parameters of a query.

use axum::extract::Query;

use crate::error::ApiError;

/// The parameters of a query, which may repeat.
pub(crate) type Parameters = Query<Vec<(String, String)>>;

/// The last value of a parameter.
pub(crate) fn parameter<'a>(parameters: &'a Parameters, name: &str) -> Option<&'a str> {
    parameters.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
}

/// A switch, in the spellings that pydantic takes.
pub(crate) fn flag(parameters: &Parameters, name: &str, default: bool) -> Result<bool, ApiError> {
    let Some(value) = parameter(parameters, name) else { return Ok(default) };
    match value.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" | "t" | "y" => Ok(true),
        "false" | "0" | "no" | "off" | "f" | "n" => Ok(false),
        _ => {
            let message = "Input should be a valid boolean, unable to interpret input";
            Err(ApiError::bad_request(message).with_param(name))
        }
    }
}
