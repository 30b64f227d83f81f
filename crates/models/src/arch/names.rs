//! Tables of tensor names.

use crate::checkpoint::Format;
use crate::config::Architecture;

/// Names of an encoder's tensors, without `.weight` and `.bias`. `{}` stands for the layer.
pub(crate) struct EncoderNames {
    pub(crate) patches: &'static str,
    pub(crate) positions: &'static str,
    pub(crate) attention_norm: &'static str,
    /// One tensor with the rows of q, k and v, or one for each.
    pub(crate) qkv: &'static [&'static str],
    pub(crate) output: &'static str,
    pub(crate) mlp_norm: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

/// Qwen3-VL in safetensors files.
pub(crate) const QWEN3_VL: EncoderNames = EncoderNames {
    patches: "model.visual.patch_embed.proj",
    positions: "model.visual.pos_embed",
    attention_norm: "model.visual.blocks.{}.norm1",
    qkv: &["model.visual.blocks.{}.attn.qkv"],
    output: "model.visual.blocks.{}.attn.proj",
    mlp_norm: "model.visual.blocks.{}.norm2",
    up: "model.visual.blocks.{}.mlp.linear_fc1",
    down: "model.visual.blocks.{}.mlp.linear_fc2",
};

/// Idefics3 in safetensors files: SigLIP.
pub(crate) const IDEFICS3: EncoderNames = EncoderNames {
    patches: "model.vision_model.embeddings.patch_embedding",
    positions: "model.vision_model.embeddings.position_embedding",
    attention_norm: "model.vision_model.encoder.layers.{}.layer_norm1",
    qkv: &[
        "model.vision_model.encoder.layers.{}.self_attn.q_proj",
        "model.vision_model.encoder.layers.{}.self_attn.k_proj",
        "model.vision_model.encoder.layers.{}.self_attn.v_proj",
    ],
    output: "model.vision_model.encoder.layers.{}.self_attn.out_proj",
    mlp_norm: "model.vision_model.encoder.layers.{}.layer_norm2",
    up: "model.vision_model.encoder.layers.{}.mlp.fc1",
    down: "model.vision_model.encoder.layers.{}.mlp.fc2",
};

/// Every encoder in an mmproj file.
pub(crate) const MMPROJ: EncoderNames = EncoderNames {
    patches: "v.patch_embd",
    positions: "v.position_embd",
    attention_norm: "v.blk.{}.ln1",
    qkv: &["v.blk.{}.attn_qkv"],
    output: "v.blk.{}.attn_out",
    mlp_norm: "v.blk.{}.ln2",
    up: "v.blk.{}.ffn_up",
    down: "v.blk.{}.ffn_down",
};

/// Purpose of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Embedding,
    FinalNorm,
    Head,
    AttentionNorm,
    Q,
    K,
    V,
    Output,
    QNorm,
    KNorm,
    MlpNorm,
    Gate,
    Up,
    Down,
}

/// GGUF's tensor of divisors of the rotary frequencies, one per pair.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

impl Role {
    /// Returns the names `(Hugging Face, GGUF)`, in which `{}` stands for the layer.
    const fn stems(self) -> (&'static str, &'static str) {
        match self {
            Role::Embedding => ("model.embed_tokens", "token_embd"),
            Role::FinalNorm => ("model.norm", "output_norm"),
            Role::Head => ("lm_head", "output"),
            Role::AttentionNorm => ("model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
            Role::Q => ("model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
            Role::K => ("model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
            Role::V => ("model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
            Role::Output => ("model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
            Role::QNorm => ("model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
            Role::KNorm => ("model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
            Role::MlpNorm => ("model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
            Role::Gate => ("model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
            Role::Up => ("model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
            Role::Down => ("model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
        }
    }
}

/// Returns what stands in place of `model.` in the names of a decoder's tensors in safetensors files.
pub(crate) const fn decoder_prefix(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Qwen3Vl => "model.language_model.",
        Architecture::Idefics3 => "model.text_model.",
        Architecture::Llama | Architecture::Mistral | Architecture::Qwen2 | Architecture::Qwen3 => "model.",
    }
}

/// Returns the name of a role's weight. Roles outside the layers ignore `layer`.
pub(crate) fn weight(format: Format, role: Role, layer: usize) -> String {
    named(format, role, layer, "weight")
}

/// Returns the name of a role's bias.
pub(crate) fn bias(format: Format, role: Role, layer: usize) -> String {
    named(format, role, layer, "bias")
}

fn named(format: Format, role: Role, layer: usize, kind: &str) -> String {
    let (hf, gguf) = role.stems();
    let stem = match format {
        Format::HuggingFace => hf,
        Format::Gguf => gguf,
    };
    format!("{}.{kind}", stem.replace("{}", &layer.to_string()))
}
