//! Values of flags, parsed as vLLM parses them.

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use octavo_backend_cuda::ChipModel;
use octavo_engine::SchedulingPolicy;
use octavo_models::Runner;
use octavo_server::FingerprintMode;
use octavo_telemetry::LogFormat;
use octavo_text::ContentFormat;
use serde_json::{Map, Value};

/// The device that computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// A usable GPU, otherwise the processor.
    Auto,
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// The reference backend, on the processor.
    Candle,
}

/// Precision of weights and arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    Auto,
    #[value(alias = "float")]
    Float32,
    Bfloat16,
    #[value(alias = "half")]
    Float16,
}

/// Whether each NUMA node has a copy of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Numa {
    /// It has one if the copies fit.
    Auto,
    Off,
}

/// The source of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LoadFormat {
    /// The model's files.
    Auto,
    /// Random weights.
    Dummy,
}

/// The modules of vLLM that can have detailed traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TracedModule {
    Model,
    Worker,
    All,
}

/// Context length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MaxModelLen {
    /// The model's context, limited by the memory.
    Auto,
    /// Maximum length of prompt and output together, in tokens.
    Tokens(usize),
}

/// The source of sampling defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GenerationSource {
    /// The model's `generation_config.json`.
    Model,
    /// The defaults of the API.
    Api,
    /// The path of a `generation_config.json` or of a folder that contains one.
    Path(std::path::PathBuf),
}

/// A JSON object.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct JsonObject(pub(crate) Map<String, Value>);

/// A parser of names, each with its help (which may be empty) and its value.
pub(crate) fn named<T: Clone + Send + Sync + 'static, const N: usize>(
    names: [(&'static str, &'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    let values = names.iter().map(|(name, help, _)| {
        let value = PossibleValue::new(*name);
        if help.is_empty() { value } else { value.help(*help) }
    });
    let values: Vec<_> = values.collect();
    PossibleValuesParser::new(values).try_map(move |given| {
        let found = names.iter().find(|(name, ..)| *name == given).map(|(.., value)| value.clone());
        found.ok_or_else(|| format!("'{given}' is unknown"))
    })
}

/// The parser of `--scheduling-policy`.
pub(crate) fn scheduling_policy() -> impl TypedValueParser<Value = SchedulingPolicy> {
    named([
        ("fcfs", "First come, first served", SchedulingPolicy::Fcfs),
        ("priority", "Lower `priority` first", SchedulingPolicy::Priority),
        ("fair", "The client that has received the least service first", SchedulingPolicy::Fair),
    ])
}

/// The form of content of `--chat-template-content-format`; `None` for the one that the template's source suggests.
pub(crate) type ContentFormatFlag = Option<ContentFormat>;

/// The parser of `--chat-template-content-format`.
pub(crate) fn content_format() -> impl TypedValueParser<Value = ContentFormatFlag> {
    named([
        ("auto", "The form that the template's source suggests", None),
        ("string", "A string, in which newlines join the parts of a message", Some(ContentFormat::String)),
        ("openai", "A list of parts", Some(ContentFormat::OpenAi)),
    ])
}

/// The parser of `--log-format`.
pub(crate) fn log_format() -> impl TypedValueParser<Value = LogFormat> {
    named([
        ("text", "Text for people", LogFormat::Text),
        ("json", "A JSON object per line, for programs", LogFormat::Json),
    ])
}

/// The parser of `--fingerprint-mode`.
pub(crate) fn fingerprint_mode() -> impl TypedValueParser<Value = FingerprintMode> {
    named([
        ("full", "Version and a hash of the configuration", FingerprintMode::Full),
        ("hash", "The hash alone", FingerprintMode::Hash),
        ("none", "Nothing", FingerprintMode::None),
    ])
}

/// The parser of `--runner`.
pub(crate) fn runner() -> impl TypedValueParser<Value = Runner> {
    named([("auto", "", Runner::Auto), ("generate", "", Runner::Generate), ("pooling", "", Runner::Pooling)])
}

/// A list of texts. Each value is one text or a JSON list of texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TextList(pub(crate) Vec<String>);

impl TextList {
    /// All texts in one list.
    pub(crate) fn flat(lists: &[Self]) -> Vec<String> {
        lists.iter().flat_map(|list| list.0.iter().cloned()).collect()
    }
}

/// A count of at least 1 with vLLM's suffixes: `1k` = 1000, `1K` = 1024, and so on for m/M and g/G.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    match amount(text)? {
        0 => Err(format!("'{text}' is not a whole number of at least 1")),
        count => Ok(count),
    }
}

/// As [`count`], for 32-bit counts.
pub(crate) fn small_count(text: &str) -> Result<u32, String> {
    u32::try_from(count(text)?).map_err(|_| format!("'{text}' is too large"))
}

/// As [`count`], but including 0.
pub(crate) fn amount(text: &str) -> Result<usize, String> {
    let (digits, factor): (&str, f64) = match text.char_indices().last() {
        Some((at, suffix)) => match suffix {
            'k' => (&text[..at], 1e3),
            'K' => (&text[..at], 1024.0),
            'm' => (&text[..at], 1e6),
            'M' => (&text[..at], 1024.0 * 1024.0),
            'g' => (&text[..at], 1e9),
            'G' => (&text[..at], 1024.0 * 1024.0 * 1024.0),
            _ => (text, 1.0),
        },
        None => return Err("a number is expected".into()),
    };
    let value: f64 = digits.parse().map_err(|_| format!("'{text}' is not a number such as 4096, 4k or 4K"))?;
    let value = value * factor;
    if value < 0.0 || value.fract() != 0.0 || value.is_nan() || value > (1u64 << 53) as f64 {
        return Err(format!("'{text}' is not a whole number of at least 0"));
    }
    Ok(value as usize)
}

pub(crate) fn max_model_len(text: &str) -> Result<MaxModelLen, String> {
    match text {
        "auto" | "-1" => Ok(MaxModelLen::Auto),
        _ => count(text).map(MaxModelLen::Tokens),
    }
}

/// The method by which an operator expects the weights to be quantised; `None` if any or none is fine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quantization(pub(crate) Option<&'static str>);

/// A [`Quantization`] by vLLM's names.
pub(crate) fn quantization(text: &str) -> Result<Quantization, String> {
    let method = match text {
        "none" | "None" | "auto" => None,
        "gguf" => Some("gguf"),
        "awq" | "awq_marlin" | "auto_awq" => Some("awq"),
        "gptq" | "gptq_marlin" | "auto_gptq" => Some("gptq"),
        "fp8" => Some("fp8"),
        "compressed-tensors" => Some("compressed-tensors"),
        "bitsandbytes" => Some("bitsandbytes"),
        "modelopt" | "modelopt_fp4" => Some("modelopt"),
        "mxfp4" | "gpt_oss_mxfp4" => Some("mxfp4"),
        _ => {
            return Err(
                "this method is not supported; accepted: gguf, awq, gptq, fp8, compressed-tensors, bitsandbytes, modelopt, \
                 mxfp4"
                    .to_owned(),
            );
        }
    };
    Ok(Quantization(method))
}

/// A [`LoadFormat`] by vLLM's names; those of loaders that are not supported are refused with the reason.
pub(crate) fn load_format(text: &str) -> Result<LoadFormat, String> {
    let reason = match text {
        "auto" | "hf" | "safetensors" | "gguf" => return Ok(LoadFormat::Auto),
        "dummy" => return Ok(LoadFormat::Dummy),
        "bitsandbytes" => {
            "weights are not quantized while they are loaded; auto reads a checkpoint that is quantized, and GGUF files"
        }
        "mistral" => {
            "Mistral's own checkpoint layout is not read; use a repository with config.json and safetensors files"
        }
        "runai_streamer" | "runai_streamer_sharded" | "tensorizer" | "fastsafetensors" | "instanttensor" => {
            "weights are memory-mapped from local safetensors or GGUF files; use auto"
        }
        "sharded_state" => "a server computes on one device, so there are no shards of its state",
        "pt" | "npcache" => "PyTorch files are not read; convert the model to safetensors or GGUF",
        _ => "no such format; accepted: auto, safetensors, gguf, dummy",
    };
    Err(reason.to_owned())
}

/// An optional upper bound.
pub(crate) type Bound = Option<u32>;

/// A [`Bound`]; `-1` means none.
pub(crate) fn bound(text: &str) -> Result<Bound, String> {
    if text == "-1" {
        return Ok(None);
    }
    let bound = u32::try_from(amount(text)?).map_err(|_| format!("'{text}' is too large; -1 is no bound"))?;
    Ok(Some(bound))
}

/// A size in GiB, which need not be whole, in bytes.
pub(crate) fn gibibytes(text: &str) -> Result<u64, String> {
    match text.parse::<f64>() {
        Ok(size) if (0.0..=65_536.0).contains(&size) => Ok((size * (1_u64 << 30) as f64) as u64),
        _ => Err(format!("'{text}' is not a size in GiB between 0 and 65536")),
    }
}

/// A key that a client can send.
pub(crate) fn api_key(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("the key is empty; give one, or leave the flag out to serve without API keys".into()),
        _ => Ok(text.to_owned()),
    }
}

/// A GPU for which times are predicted.
pub(crate) fn chip_model(text: &str) -> Result<ChipModel, String> {
    let names = || ChipModel::ALL.map(|model| model.name).join(", ");
    ChipModel::find(text).ok_or_else(|| format!("nothing is known of '{text}'; accepted: {}", names()))
}

pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("'{text}' is not a number of seconds between 0 and 86400")),
    }
}

/// A fraction above 0 and up to 1.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err(format!("'{text}' is not a number above 0 and up to 1")),
    }
}

/// A fraction from 0 to below 1.
pub(crate) fn part(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(part) if (0.0..1.0).contains(&part) => Ok(part),
        _ => Err(format!("'{text}' is not a number from 0 to below 1")),
    }
}

pub(crate) fn json_object(text: &str) -> Result<JsonObject, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(JsonObject(object)),
        Ok(_) => Err(format!("'{text}' is JSON but not an object such as {{\"key\": 1}}")),
        Err(error) => Err(format!("'{text}' is not JSON: {error}")),
    }
}

pub(crate) fn text_list(text: &str) -> Result<TextList, String> {
    if !text.trim_start().starts_with('[') {
        return Ok(TextList(vec![text.to_owned()]));
    }
    let list = serde_json::from_str(text).map_err(|error| format!("'{text}' is not a JSON list of texts: {error}"))?;
    Ok(TextList(list))
}

pub(crate) fn generation_source(text: &str) -> Result<GenerationSource, String> {
    match text {
        "" => Err("auto, vllm or a path is expected".into()),
        "auto" => Ok(GenerationSource::Model),
        "vllm" => Ok(GenerationSource::Api),
        path => Ok(GenerationSource::Path(path.into())),
    }
}

/// The path of a plot.
pub(crate) fn svg(text: &str) -> Result<std::path::PathBuf, String> {
    let path = std::path::PathBuf::from(text);
    match path.extension() {
        Some(extension) if extension.eq_ignore_ascii_case("svg") => Ok(path),
        _ => Err("plots are written as SVG: its name must end with .svg".into()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn counts_take_suffixes() {
        assert_eq!(count("1k"), Ok(1000));
        assert_eq!(count("1.5K"), Ok(1536));
        assert_eq!(count("2M"), Ok(2 << 20));
        assert_eq!(amount("0"), Ok(0));
        for bad in ["", "k", "0", "-4", "1.5", "nan", "inf", "1e300", "4kk"] {
            assert!(count(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_load_format_is_supported_or_refused_with_a_reason() {
        assert_eq!(
            ["auto", "hf", "gguf"].map(load_format),
            [Ok(LoadFormat::Auto), Ok(LoadFormat::Auto), Ok(LoadFormat::Auto)]
        );
        assert_eq!(load_format("dummy"), Ok(LoadFormat::Dummy));
        for (name, part) in [
            ("bitsandbytes", "GGUF"),
            ("mistral", "safetensors"),
            ("runai_streamer", "memory-mapped"),
            ("x", "accepted: auto"),
        ] {
            assert!(load_format(name).unwrap_err().contains(part), "{name}");
        }
    }

    #[test]
    fn small_counts_fit_32_bits() {
        assert_eq!(small_count("4K"), Ok(4096));
        assert!(small_count("0").is_err() && small_count("5G").is_err());
    }

    #[test]
    fn plots_are_svg() {
        assert_eq!(svg("a/b.SVG"), Ok("a/b.SVG".into()));
        assert!(svg("b.png").is_err() && svg("svg").is_err());
    }

    #[test]
    fn a_bound_may_be_none() {
        assert_eq!(bound("-1"), Ok(None));
        assert_eq!(bound("20"), Ok(Some(20)));
        for bad in ["-2", "5G", "x", ""] {
            assert!(bound(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shares_and_seconds_have_ranges() {
        assert_eq!(share("0.90"), Ok(0.9));
        assert_eq!(seconds("2.5"), Ok(2.5));
        for bad in ["0", "1.1", "-1", "nan", "x"] {
            assert!(share(bad).is_err(), "{bad}");
        }
        assert_eq!(part("0"), Ok(0.0));
        for bad in ["1", "-0.1", "nan", "x"] {
            assert!(part(bad).is_err(), "{bad}");
        }
        for bad in ["-1", "1e9", "nan", "soon"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn lists_are_plain_or_json() {
        assert_eq!(text_list("*"), Ok(TextList(vec!["*".into()])));
        assert_eq!(text_list(r#"["a", "b"]"#), Ok(TextList(vec!["a".into(), "b".into()])));
        assert!(text_list("[1]").is_err());
        assert!(text_list("[").is_err());
    }

    #[test]
    fn only_objects_are_json_flags() {
        assert!(json_object(r#"{"a": [1]}"#).is_ok());
        for bad in ["[]", "1", "{", "", "null"] {
            assert!(json_object(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_value_or_an_error(text in "\\PC{0,24}") {
            let _ = (amount(&text), bound(&text), seconds(&text), share(&text), json_object(&text), text_list(&text));
        }

        #[test]
        fn whole_numbers_are_themselves(value in 0u32..) {
            prop_assert_eq!(amount(&value.to_string()), Ok(value as usize));
        }
    }
}
