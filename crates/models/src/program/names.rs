//! Names of tensors.

use crate::checkpoint::Format;

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
    /// Learned positions.
    Positions,
    TokenTypes,
    /// Norm of the sum of embeddings.
    EmbeddingNorm,
    FinalNorm,
    Head,
    AttentionNorm,
    Q,
    K,
    V,
    /// Rows of q, k and v.
    Qkv,
    Output,
    QNorm,
    KNorm,
    /// Low-rank form of the queries of latent attention, its norm, and the queries.
    QLow,
    QLowNorm,
    QHigh,
    /// Latent and rotary key, and the norm of the latent.
    Latent,
    LatentNorm,
    /// Matrices of each head between the latent and its keys and values.
    LatentKey,
    LatentValue,
    /// Norm of the attention's output.
    AttentionPostNorm,
    MlpNorm,
    /// Norm of the MLP's output.
    MlpPostNorm,
    Gate,
    Up,
    /// Rows of the gate and of up.
    GateUp,
    Down,
    /// Attention sinks.
    Sinks,
    /// The router of a mixture of experts.
    Router,
    /// Addend of the scores of experts that only the choice sees.
    RouterCorrection,
    ExpertGate,
    ExpertUp,
    /// Rows of the gate and of up.
    ExpertGateUp,
    ExpertDown,
    /// Gate of the shared expert's output.
    SharedRouter,
    SharedGate,
    SharedUp,
    SharedDown,
}

/// Stands for the index of an expert or a head in the name of a tensor.
pub(crate) const EXPERT: &str = "{e}";

/// GGUF's tensors of divisors of the rotary frequencies, one per pair: that of Llama 3, and those of Phi-3.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";
pub(crate) const LONG_ROPE_FACTORS: &str = "rope_factors_long.weight";
pub(crate) const SHORT_ROPE_FACTORS: &str = "rope_factors_short.weight";

impl Role {
    /// Returns whether the name has no ending for the kind of tensor.
    const fn is_whole(self) -> bool {
        matches!(self, Role::Sinks | Role::RouterCorrection)
    }

    /// Returns the names `(Hugging Face, GGUF)`, in which `{}` stands for the layer and [`EXPERT`] for the expert or
    /// head. A tensor whose name has none holds all of them.
    const fn stems(self) -> (&'static str, &'static str) {
        match self {
            Role::Embedding => ("model.embed_tokens", "token_embd"),
            Role::Positions => ("model.position_embeddings", "position_embd"),
            Role::TokenTypes => ("model.token_type_embeddings", "token_types"),
            Role::EmbeddingNorm => ("model.embedding_norm", "token_embd_norm"),
            Role::FinalNorm => ("model.norm", "output_norm"),
            Role::Head => ("lm_head", "output"),
            Role::AttentionNorm => ("model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
            Role::Q => ("model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
            Role::K => ("model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
            Role::V => ("model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
            Role::Qkv => ("model.layers.{}.self_attn.qkv_proj", "blk.{}.attn_qkv"),
            Role::Output => ("model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
            Role::QNorm => ("model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
            Role::KNorm => ("model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
            Role::QLow => ("model.layers.{}.self_attn.q_a_proj", "blk.{}.attn_q_a"),
            Role::QLowNorm => ("model.layers.{}.self_attn.q_a_layernorm", "blk.{}.attn_q_a_norm"),
            Role::QHigh => ("model.layers.{}.self_attn.q_b_proj", "blk.{}.attn_q_b"),
            Role::Latent => ("model.layers.{}.self_attn.kv_a_proj_with_mqa", "blk.{}.attn_kv_a_mqa"),
            Role::LatentNorm => ("model.layers.{}.self_attn.kv_a_layernorm", "blk.{}.attn_kv_a_norm"),
            Role::LatentKey => ("model.layers.{}.self_attn.kv_b_proj.{e}.k", "blk.{}.attn_k_b"),
            Role::LatentValue => ("model.layers.{}.self_attn.kv_b_proj.{e}.v", "blk.{}.attn_v_b"),
            Role::AttentionPostNorm => ("model.layers.{}.post_attention_layernorm", "blk.{}.post_attention_norm"),
            Role::MlpPostNorm => ("model.layers.{}.post_feedforward_layernorm", "blk.{}.post_ffw_norm"),
            Role::MlpNorm => ("model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
            Role::Gate => ("model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
            Role::Up => ("model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
            Role::GateUp => ("model.layers.{}.mlp.gate_up_proj", "blk.{}.ffn_up"),
            Role::Down => ("model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
            Role::Sinks => ("model.layers.{}.self_attn.sinks", "blk.{}.attn_sinks.weight"),
            Role::Router => ("model.layers.{}.mlp.gate", "blk.{}.ffn_gate_inp"),
            Role::RouterCorrection => ("model.layers.{}.mlp.gate.e_score_correction_bias", "blk.{}.exp_probs_b.bias"),
            Role::ExpertGate => ("model.layers.{}.mlp.experts.{e}.gate_proj", "blk.{}.ffn_gate_exps"),
            Role::ExpertUp => ("model.layers.{}.mlp.experts.{e}.up_proj", "blk.{}.ffn_up_exps"),
            Role::ExpertGateUp => ("model.layers.{}.mlp.experts.{e}.gate_up_proj", "blk.{}.ffn_gate_up_exps"),
            Role::ExpertDown => ("model.layers.{}.mlp.experts.{e}.down_proj", "blk.{}.ffn_down_exps"),
            Role::SharedRouter => ("model.layers.{}.mlp.shared_expert_gate", "blk.{}.ffn_gate_inp_shexp"),
            Role::SharedGate => ("model.layers.{}.mlp.shared_expert.gate_proj", "blk.{}.ffn_gate_shexp"),
            Role::SharedUp => ("model.layers.{}.mlp.shared_expert.up_proj", "blk.{}.ffn_up_shexp"),
            Role::SharedDown => ("model.layers.{}.mlp.shared_expert.down_proj", "blk.{}.ffn_down_shexp"),
        }
    }
}

/// Names of the tensors of a decoder or an encoder of texts, as far as they are not those of most families.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names {
    /// Stands in place of `model.` in safetensors files.
    pub(crate) prefix: &'static str,
    /// Roles with other stems, for safetensors and GGUF files.
    pub(crate) others: &'static [(Role, (&'static str, &'static str))],
    /// Whether q, k and v are one tensor, and gate and up too.
    pub(crate) fused: bool,
    /// Whether gate and up of the experts are one tensor in safetensors files.
    pub(crate) fused_experts: bool,
    /// Whether transformers has the outputs of an expert's gate and up in turn, in matrices of inputs by outputs.
    pub(crate) experts_in_turn: bool,
}

impl Names {
    /// The names of most families.
    pub(crate) const DEFAULT: Self =
        Self { prefix: "model.", others: &[], fused: false, fused_experts: false, experts_in_turn: false };

    /// Returns the name of a role's weight. Roles outside the layers ignore `layer`.
    pub(crate) fn weight(&self, format: Format, role: Role, layer: usize) -> String {
        self.named(format, role, layer, "weight")
    }

    /// Returns the name of a role's bias.
    pub(crate) fn bias(&self, format: Format, role: Role, layer: usize) -> String {
        self.named(format, role, layer, "bias")
    }

    /// Returns whether gate and up of the experts are one tensor.
    pub(crate) fn fuses_experts(&self, format: Format) -> bool {
        self.fused_experts && format == Format::HuggingFace
    }

    fn named(&self, format: Format, role: Role, layer: usize, kind: &str) -> String {
        let other = self.others.iter().find(|(other, _)| *other == role).map(|(_, stems)| *stems);
        let (hf, gguf) = other.unwrap_or(role.stems());
        let (prefix, stem) = match format {
            Format::Gguf => ("", gguf),
            Format::HuggingFace => hf.strip_prefix("model.").map_or(("", hf), |rest| (self.prefix, rest)),
        };
        let stem = stem.replace("{}", &layer.to_string());
        if role.is_whole() { format!("{prefix}{stem}") } else { format!("{prefix}{stem}.{kind}") }
    }
}
