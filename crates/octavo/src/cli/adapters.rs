//! Flags of adapters.

use clap::Args;
use serde_json::Value;

use crate::cli::values;

/// LoRA adapters that are served beside the model.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Adapters")]
pub(crate) struct AdapterArgs {
    /// Serve LoRA adapters beside the model.
    ///
    /// A request names an adapter as its model. With VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 there are routes that load and
    /// unload adapters, and an adapter of an unknown name is searched for in the folder VLLM_LORA_RESOLVER_CACHE_DIR.
    #[arg(long)]
    pub(crate) enable_lora: bool,

    /// Adapters to load at the start, each as NAME=FOLDER or as {"name": …, "path": …, "base_model_name": …}.
    #[arg(long, num_args = 1.., value_parser = lora_module, value_name = "NAME=DIR|JSON")]
    pub(crate) lora_modules: Vec<LoraModule>,

    /// Maximum number of different adapters in a step.
    ///
    /// Requests with further ones wait. The base model does not count. On a GPU, memory is kept for as many.
    #[arg(long, value_parser = values::count, default_value = "1", value_name = "N")]
    pub(crate) max_loras: usize,

    /// Maximum number of adapters whose weights are kept in memory, at least --max-loras [default: --max-loras].
    ///
    /// The weights of the others are read from their files when a request needs them. The adapters that were used last are
    /// kept.
    #[arg(long, value_parser = values::count, value_name = "N")]
    pub(crate) max_cpu_loras: Option<usize>,

    /// Largest rank of an adapter.
    #[arg(long, value_parser = values::count, default_value = "16", value_name = "RANK")]
    pub(crate) max_lora_rank: usize,
}

/// An adapter to load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LoraModule {
    pub(crate) name: String,
    pub(crate) path: String,
    /// The name of its base model in the list of models.
    pub(crate) base: Option<String>,
}

/// Parses `NAME=FOLDER` or an object. As in vLLM, a text with a comma is an object.
fn lora_module(text: &str) -> Result<LoraModule, String> {
    if let Some((name, path)) = text.split_once('=').filter(|_| !text.contains(',')) {
        return checked(LoraModule { name: name.into(), path: path.into(), base: None });
    }
    let object: Value = serde_json::from_str(text).map_err(|_| "it is neither NAME=FOLDER nor a JSON object")?;
    let field = |key: &str| object.get(key).and_then(Value::as_str).map(str::to_owned);
    let (Some(name), Some(path)) = (field("name"), field("path")) else {
        return Err("the object needs \"name\" and \"path\"".into());
    };
    checked(LoraModule { name, path, base: field("base_model_name") })
}

fn checked(module: LoraModule) -> Result<LoraModule, String> {
    match module.name.is_empty() || module.path.is_empty() {
        true => Err("the name or the folder is empty".into()),
        false => Ok(module),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_pairs_or_objects() {
        let module = |name: &str, path: &str, base: Option<&str>| LoraModule {
            name: name.into(),
            path: path.into(),
            base: base.map(str::to_owned),
        };
        assert_eq!(lora_module("sql=/adapters/sql"), Ok(module("sql", "/adapters/sql", None)));
        assert_eq!(lora_module("a=/x=y"), Ok(module("a", "/x=y", None)));
        let object = r#"{"name": "a", "path": "/x,y", "base_model_name": "m"}"#;
        assert_eq!(lora_module(object), Ok(module("a", "/x,y", Some("m"))));
        assert_eq!(lora_module(r#"{"name":"a","path":"/x"}"#), Ok(module("a", "/x", None)));
        for text in ["a", "=/x", "a=", "{}", r#"{"name": "a"}"#, "{", "a=/x,b=/y", r#"{"name":"","path":"/x"}"#] {
            assert!(lora_module(text).is_err(), "{text}");
        }
    }
}
