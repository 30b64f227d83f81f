//! The quantisation that a `config.json` describes.

use serde_json::{Map, Value};

use super::super::{CheckpointError, KvScheme};
use crate::config::{ConfigError, Fields};
use crate::family::Family;

/// How the weights of a Hugging Face directory are quantised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Quantisation {
    Gptq(Gptq),
    Awq {
        /// Whether there are no zero points.
        symmetric: bool,
    },
    /// FP8 (E4M3), as DeepSeek and Qwen publish it.
    Float8(Float8),
    /// NVIDIA's ModelOpt: FP8 (E4M3) with the same tensors, or NVFP4.
    ModelOpt(Float8),
    CompressedTensors(Float8),
    BitsAndBytes,
}

/// Settings of GPTQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gptq {
    pub(super) bits: u32,
    /// Whether every zero point is the middle of the range, whatever is stored.
    pub(super) symmetric: bool,
    /// Whether zero points are stored less 1: the first version of the format.
    pub(super) less_one: bool,
}

/// Settings of FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Float8 {
    /// Rows and columns with one scale, if scales are by block.
    pub(super) block: [usize; 2],
    /// Whether the checkpoint is made for inputs that are rounded to FP8.
    inputs: bool,
}

/// Key of `config.json` with the settings.
pub(crate) const QUANTISATION: &str = "quantization_config";

/// Size of a block if it is omitted.
const BLOCK: [usize; 2] = [128, 128];

impl Quantisation {
    /// Reads the configuration; `None` if the weights are plain, or if the family has its own layout of them.
    ///
    /// # Errors
    /// Returns an error that names the method or the setting which is not supported.
    pub(crate) fn read(fields: &Fields<'_>, family: &Family) -> Result<Option<Self>, ConfigError> {
        let Some(found) = settings(fields)? else { return Ok(None) };
        let method = found.str("quant_method")?.unwrap_or("unknown");
        if family.layout.as_ref().is_some_and(|layout| layout.method == Some(method)) {
            return Ok(None);
        }
        Ok(Some(match method {
            "gptq" => Self::Gptq(gptq(&found)?),
            "awq" => awq(&found)?,
            "fp8" => Self::Float8(float8(&found)?),
            "compressed-tensors" => Self::CompressedTensors(compressed_tensors(&found)?),
            "bitsandbytes" => Self::BitsAndBytes,
            "modelopt" | "modelopt_fp4" => Self::ModelOpt(model_opt(&found)?),
            other => {
                return Err(ConfigError::Unsupported(format!(
                    "the quantisation method '{}' of this checkpoint (supported: gptq, awq, fp8, compressed-tensors, \
                     bitsandbytes, modelopt)",
                    other.escape_debug()
                )));
            }
        }))
    }

    /// Returns whether the checkpoint is made for products whose inputs are rounded to FP8.
    pub(crate) const fn has_fp8_inputs(&self) -> bool {
        match self {
            Self::Float8(config) | Self::ModelOpt(config) | Self::CompressedTensors(config) => config.inputs,
            Self::Gptq(_) | Self::Awq { .. } | Self::BitsAndBytes => false,
        }
    }

    /// Returns the name in `quant_method`.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Gptq(_) => "gptq",
            Self::Awq { .. } => "awq",
            Self::Float8(_) => "fp8",
            Self::CompressedTensors(_) => "compressed-tensors",
            Self::BitsAndBytes => "bitsandbytes",
            Self::ModelOpt(_) => "modelopt",
        }
    }
}

/// A file beside `config.json` that describes the quantisation of a directory whose `config.json` does not.
struct SideFile {
    name: &'static str,
    /// The method that it stands for.
    method: &'static str,
    /// Key of the object with the settings, if they are not the whole file.
    within: Option<&'static str>,
}

/// Files of ModelOpt, and of AutoGPTQ and AutoAWQ before transformers read their formats.
const SIDE_FILES: [SideFile; 3] = [
    SideFile { name: "hf_quant_config.json", method: "modelopt", within: Some("quantization") },
    SideFile { name: "quantize_config.json", method: "gptq", within: None },
    SideFile { name: "quant_config.json", method: "awq", within: None },
];

/// Returns whether this is the name of a file that describes the quantisation of a directory.
pub(crate) fn is_side_file(name: &str) -> bool {
    SIDE_FILES.iter().any(|file| file.name == name)
}

/// Adds the settings of a file beside `config.json` to a configuration that has none. `read` returns the object in a file of
/// the directory.
///
/// # Errors
/// Returns the error of `read`, or an error if the file has no settings.
pub(crate) fn add_side_file(
    config: &mut Map<String, Value>,
    read: impl Fn(&str) -> Result<Option<Map<String, Value>>, CheckpointError>,
    malformed: impl Fn(&str, &str) -> CheckpointError,
) -> Result<(), CheckpointError> {
    let fields = Fields::new(config);
    if !matches!(settings(&fields), Ok(None)) {
        return Ok(());
    }
    for SideFile { name, method, within } in SIDE_FILES {
        let Some(mut found) = read(name)? else { continue };
        if let Some(key) = within {
            let Some(Value::Object(object)) = found.remove(key) else {
                return Err(malformed(name, &format!("it has no object '{key}'")));
            };
            found = object;
        }
        found.entry("quant_method").or_insert_with(|| method.into());
        config.insert(QUANTISATION.to_owned(), found.into());
        break;
    }
    Ok(())
}

/// Returns the object that describes the quantisation.
fn settings<'a>(fields: &Fields<'a>) -> Result<Option<Fields<'a>>, ConfigError> {
    if let Some(found) = fields.object(QUANTISATION)? {
        return Ok(Some(found));
    }
    let text = fields.object("text_config")?;
    let within = text.map(|text| text.object(QUANTISATION)).transpose()?.flatten();
    Ok(match within {
        Some(found) => Some(found),
        None => fields.object("compression_config")?,
    })
}

/// Reads for which type of the KV cache a checkpoint has scales: `kv_cache_scheme` of compressed-tensors and ModelOpt, or
/// ModelOpt's `kv_cache_quant_algo`.
pub(crate) fn kv_scheme(fields: &Fields<'_>) -> Result<Option<KvScheme>, ConfigError> {
    let Some(found) = settings(fields)? else { return Ok(None) };
    Ok(match found.value("kv_cache_scheme").or_else(|| found.value("kv_cache_quant_algo")) {
        None => None,
        Some(Value::String(name)) if name.eq_ignore_ascii_case("fp8") => Some(KvScheme::Fp8),
        Some(Value::String(name)) => Some(KvScheme::Other(name.escape_debug().to_string())),
        Some(Value::Object(scheme)) => {
            let scheme = Fields::new(scheme);
            let bits = scheme.usize("num_bits")?.unwrap_or(8);
            let [kind, strategy] = [("type", "float"), ("strategy", "tensor")]
                .map(|(key, default)| scheme.str(key).map(|found| found.unwrap_or(default)));
            match (bits, kind?, strategy?) {
                (8, "float", "tensor") => Some(KvScheme::Fp8),
                (bits, kind, strategy) => {
                    let [kind, strategy] = [kind, strategy].map(|name| name.escape_debug().to_string());
                    Some(KvScheme::Other(format!("{bits} bits, {kind}, {strategy}")))
                }
            }
        }
        Some(_) => return Err(ConfigError::wrong_type("kv_cache_scheme", "an object or a name")),
    })
}

fn unsupported(method: &str, setting: &str, value: &str) -> ConfigError {
    ConfigError::Unsupported(format!("{method} with '{setting}': {}", value.escape_debug()))
}

fn gptq(fields: &Fields<'_>) -> Result<Gptq, ConfigError> {
    const METHOD: &str = "GPTQ";
    let bits = fields.required("bits")?;
    if !matches!(bits, 2 | 4 | 8) {
        return Err(unsupported(METHOD, "bits", &bits.to_string()));
    }
    let format = fields.str("checkpoint_format")?.or(fields.str("format")?).unwrap_or("gptq");
    if !matches!(format, "gptq" | "gptq_v2") {
        return Err(unsupported(METHOD, "checkpoint_format", format));
    }
    // A rule with a minus has modules that are not quantised, as their tensors say too.
    let other = |modules: Fields<'_>| modules.objects().any(|(rule, _)| !rule.starts_with("-:"));
    if fields.object("dynamic")?.is_some_and(other) {
        return Err(ConfigError::Unsupported("GPTQ with other settings for some modules ('dynamic')".into()));
    }
    let symmetric = fields.bool("sym")?.unwrap_or(true);
    Ok(Gptq { bits: bits as u32, symmetric, less_one: format == "gptq" })
}

fn awq(fields: &Fields<'_>) -> Result<Quantisation, ConfigError> {
    const METHOD: &str = "AWQ";
    let bits = fields.usize("bits")?.or(fields.usize("w_bit")?).unwrap_or(4);
    if bits != 4 {
        return Err(unsupported(METHOD, "bits", &bits.to_string()));
    }
    let version = fields.str("version")?.unwrap_or("gemm");
    if !version.eq_ignore_ascii_case("gemm") {
        return Err(unsupported(METHOD, "version", version));
    }
    Ok(Quantisation::Awq { symmetric: !fields.bool("zero_point")?.unwrap_or(true) })
}

fn float8(fields: &Fields<'_>) -> Result<Float8, ConfigError> {
    let format = fields.str("fmt")?.unwrap_or("e4m3");
    if format != "e4m3" {
        return Err(unsupported("FP8", "fmt", format));
    }
    Float8::new(fields.usizes("weight_block_size")?, fields.str("activation_scheme")?.is_some())
}

fn model_opt(fields: &Fields<'_>) -> Result<Float8, ConfigError> {
    let algorithm = fields.str("quant_algo")?.unwrap_or("unknown");
    match algorithm {
        "FP8" | "FP8_PER_CHANNEL_PER_TOKEN" => Float8::new(None, true),
        // Of these, only weights are rounded, or inputs in another way.
        "FP8_PB_WO" | "NVFP4" | "W4A16_NVFP4" => Float8::new(None, false),
        other => Err(unsupported("ModelOpt", "quant_algo", other)),
    }
}

impl Float8 {
    /// Creates the settings for a size of blocks, 128 x 128 if it is omitted.
    fn new(block: Option<Vec<usize>>, inputs: bool) -> Result<Self, ConfigError> {
        match block.as_deref() {
            None => Ok(Self { block: BLOCK, inputs }),
            Some(&[rows, cols]) if rows > 0 && cols > 0 => Ok(Self { block: [rows, cols], inputs }),
            Some(other) => Err(ConfigError::Invalid(format!("{other:?} is no size of a block of weights"))),
        }
    }
}

fn compressed_tensors(fields: &Fields<'_>) -> Result<Float8, ConfigError> {
    const METHOD: &str = "compressed-tensors";
    const FORMATS: [&str; 7] = [
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "mixed-precision",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
    ];
    let known = |format: &&str| FORMATS.contains(format);
    if let Some(format) = fields.str("format")?.filter(|format| !known(format)) {
        return Err(unsupported(METHOD, "format", format));
    }
    if let Some(sparsity) = fields.object("sparsity_config")?.filter(|sparsity| sparsity.len() > 0) {
        let format = sparsity.str("format")?.unwrap_or("unknown");
        if format != "dense" {
            return Err(unsupported(METHOD, "sparsity_config", format));
        }
    }
    if fields.object("transform_config")?.is_some_and(|transforms| transforms.len() > 0) {
        return Err(ConfigError::Unsupported("compressed-tensors with 'transform_config'".into()));
    }
    let (mut size, mut inputs) = (None, false);
    let Some(groups) = fields.object("config_groups")? else { return Float8::new(None, false) };
    for (_, group) in groups.objects() {
        if let Some(format) = group.str("format")?.filter(|format| !known(format)) {
            return Err(unsupported(METHOD, "format", format));
        }
        if let Some(weights) = group.object("weights")? {
            size = size.or(weights.value("block_structure").and_then(structure));
        }
        if let Some(activations) = group.object("input_activations")? {
            inputs |= activations.usize("num_bits")? == Some(8) && activations.str("type")? == Some("float");
        }
    }
    Float8::new(size, inputs)
}

/// Reads `[128, 128]` or `"128x128"`.
fn structure(value: &Value) -> Option<Vec<usize>> {
    match value {
        Value::String(text) => text.split('x').map(|part| part.trim().parse().ok()).collect(),
        Value::Array(items) => items.iter().map(|item| item.as_u64().map(|n| n as usize)).collect(),
        _ => None,
    }
}
