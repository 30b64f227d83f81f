//! From a reference to a program, its weights' source and a tokenizer.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use octavo_models::{Checkpoint, GenerationConfig, TokenizerData};
use octavo_ops::{Backend, Program};
use octavo_server::{SamplingDefaults, TextModel};
use octavo_text::{ChatTemplate, GgufVocabulary, SpecialTokens, Tokenizer};
use tracing::{info, warn};

use crate::cli::ServeArgs;
use crate::pull;
use crate::system::human_bytes;

/// A model whose files are open; weights are read by [`LoadedModel::load_into`].
pub(crate) struct LoadedModel {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) program: Arc<Program>,
    pub(crate) text: TextModel,
    pub(crate) eos_token_ids: Vec<u32>,
    pub(crate) sampling_defaults: SamplingDefaults,
}

impl LoadedModel {
    pub(crate) fn load(args: &ServeArgs, reference: &str) -> Result<Self> {
        let resolved = pull::resolve(reference, &args.source)?;
        if let Some(entry) = resolved.entry.filter(|entry| !entry.served) {
            bail!("{}: the architecture '{}' is not served yet", entry.name, entry.architecture);
        }
        let path = &resolved.path;
        let checkpoint = Checkpoint::open(path)?;
        let config = checkpoint.config();
        let program = octavo_models::build_program(&checkpoint).with_context(|| path.display().to_string())?;
        info!(
            "model: {} ({}, {:.1} M parameters, {} {}) from {}",
            resolved.name,
            config.architecture.name(),
            program.parameters() as f64 / 1e6,
            human_bytes(program.weight_bytes()),
            config.dtype,
            path.display()
        );
        let tokenizer = Arc::new(tokenizer(checkpoint.tokenizer()?).with_context(|| path.display().to_string())?);
        let template = template(args, &checkpoint, tokenizer.special())?.map(Arc::new);
        let generation = checkpoint.generation_config();
        Ok(Self {
            eos_token_ids: generation.eos_token_ids.clone(),
            sampling_defaults: sampling_defaults(generation),
            program: Arc::new(program),
            text: TextModel { tokenizer, template },
            checkpoint,
        })
    }

    /// Reads the weights into `backend`, with progress on a terminal or in the log.
    pub(crate) fn load_into(&self, backend: &mut dyn Backend) -> Result<()> {
        let begun = Instant::now();
        let progress = pull::progress();
        let task = progress.begin("loading weights", Some(self.program.weight_bytes()));
        backend.load(&self.program, &self.checkpoint, &mut |bytes| task.advance_to(bytes))?;
        task.finish();
        info!(
            "dtype: float32 computation, weights {} in memory, read in {:.2} s",
            human_bytes(backend.weight_bytes()),
            begun.elapsed().as_secs_f64()
        );
        Ok(())
    }
}

fn sampling_defaults(generation: &GenerationConfig) -> SamplingDefaults {
    SamplingDefaults {
        temperature: generation.temperature,
        top_p: generation.top_p,
        top_k: generation.top_k,
        min_p: generation.min_p,
        repetition_penalty: generation.repetition_penalty,
        max_new_tokens: generation.max_new_tokens,
    }
}

/// The text layer's view of what the checkpoint carries.
fn tokenizer(data: TokenizerData) -> Result<Tokenizer> {
    let tokenizer = match data {
        TokenizerData::Json { tokenizer_json, bos, eos, unk, pad, add_bos, add_eos } => {
            Tokenizer::from_json(&tokenizer_json, SpecialTokens { bos, eos, unk, pad, add_bos, add_eos })?
        }
        TokenizerData::Gguf(g) => Tokenizer::from_gguf(GgufVocabulary {
            model: g.model,
            pre: g.pre,
            tokens: g.tokens,
            scores: g.scores,
            token_types: g.token_types,
            merges: g.merges,
            bos_id: g.bos_id,
            eos_id: g.eos_id,
            unk_id: g.unk_id,
            pad_id: g.pad_id,
            add_bos: g.add_bos,
            add_eos: g.add_eos,
            add_space_prefix: g.add_space_prefix,
        })?,
    };
    Ok(tokenizer)
}

/// `--chat-template`, or the checkpoint's. A checkpoint's broken template costs chat, not completions.
fn template(args: &ServeArgs, checkpoint: &Checkpoint, special: &SpecialTokens) -> Result<Option<ChatTemplate>> {
    if let Some(path) = &args.chat_template {
        let named = || format!("--chat-template {}", path.display());
        let source = std::fs::read_to_string(path).with_context(named)?;
        return Ok(Some(ChatTemplate::new(&source, special).with_context(named)?));
    }
    let Some(source) = checkpoint.chat_template() else {
        warn!("the model has no chat template: chat requests will be refused; give one with --chat-template");
        return Ok(None);
    };
    match ChatTemplate::new(source, special) {
        Ok(template) => Ok(Some(template)),
        Err(error) => {
            warn!("the model's chat template is unusable, chat requests will be refused: {error}");
            Ok(None)
        }
    }
}
