//! Opening and loading a model: program, weights and tokenizer.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use octavo_models::{CatalogEntry, Checkpoint, TokenizerData};
use octavo_ops::dummy::DummyWeights;
use octavo_ops::{Backend, BackendError, Program, WeightSource};
use octavo_server::{SamplingDefaults, TextModel};
use octavo_text::{ChatTemplate, GgufVocabulary, SpecialTokens, Tokenizer};
use tracing::{info, warn};

use crate::cli::{ComposeArgs, LoadFormat, MaxModelLen};
use crate::pull::{self, Wanted};
use crate::serve::images::{self, Vision};
use crate::serve::{generation, quantised, stand_in, vectors};
use crate::system::human_bytes;

/// A model with open files.
pub(crate) struct ModelFiles {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) program: Program,
    /// Type of the KV cache by vLLM's names.
    pub(crate) kv_cache_dtype: String,
    /// The encoder of images, if it is not left out.
    encoder: Option<(Program, Vision)>,
    path: PathBuf,
    entry: Option<&'static CatalogEntry>,
    template: Option<GivenTemplate>,
}

/// The chat template of `--chat-template`.
struct GivenTemplate {
    source: String,
    /// What messages call it.
    name: String,
}

/// A model with its weights in a backend.
pub(crate) struct LoadedModel {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) program: Arc<Program>,
    pub(crate) text: TextModel,
    /// The encoder of images, if the backend has it loaded.
    pub(crate) vision: Option<Vision>,
    pub(crate) eos_token_ids: Vec<u32>,
    pub(crate) sampling_defaults: SamplingDefaults,
}

impl ModelFiles {
    /// The encoder of images and its processor, if it is not left out.
    pub(crate) fn vision(&self) -> Option<&Vision> {
        self.encoder.as_ref().map(|(_, vision)| vision)
    }

    /// Makes images smaller than `pixels`, unless an operator has set their sizes.
    pub(crate) fn limit_images(&mut self, pixels: u64) {
        if let Some((_, vision)) = &mut self.encoder {
            vision.limit_area(pixels);
        }
    }

    pub(crate) fn open(args: &ComposeArgs) -> Result<Self> {
        let reference = args.model.reference();
        if let Some(tokenizer) = args.model.tokenizer.as_deref().filter(|tokenizer| *tokenizer != reference) {
            bail!("--tokenizer {tokenizer}: only the model's own tokenizer is supported, that of {reference}");
        }
        let template = args.chat.chat_template.as_deref().map(given_template).transpose()?;
        let max_images = images::limit(&args.media)?;
        let options = vectors::open_options(&args.vectors)?;
        let format = args.model.load_format;
        let resolved = pull::resolve(reference, &args.model.source, format, Wanted::Served)?;
        let path = &resolved.path;
        let mut checkpoint = match format {
            LoadFormat::Auto => Checkpoint::open_with(path, &options)?,
            LoadFormat::Dummy => {
                Checkpoint::open_without_weights_with(path, &options).context("--load-format dummy")?
            }
        };
        vectors::check(&args.vectors, &checkpoint)?;
        if let Some(MaxModelLen::Tokens(tokens)) = args.engine.max_model_len {
            checkpoint.serve(tokens);
        }
        quantised::check(args.model.quantization.and_then(|given| given.0), &checkpoint)?;
        let kv_cache_dtype = quantised::kv_cache_dtype(&args.model.kv_cache_dtype, checkpoint.kv_scheme())?;
        let config = checkpoint.config();
        let programs = octavo_models::build_programs(&checkpoint).with_context(|| path.display().to_string())?;
        let program = match args.adapters.enable_lora {
            true => programs.decoder.with_adapters(),
            false => programs.decoder,
        };
        info!(
            "model: {} ({}, {:.1} M parameters, {} {}) from {}",
            resolved.name,
            config.family.name(),
            program.parameters() as f64 / 1e6,
            human_bytes(program.weight_bytes()),
            config.dtype,
            path.display()
        );
        quantised::describe(&checkpoint, &program);
        // Without images, no setting of the processor matters.
        let vision = match max_images {
            0 => None,
            _ => Vision::from_checkpoint(&checkpoint, &args.media, max_images)?,
        };
        Ok(Self {
            encoder: programs.encoder.zip(vision),
            checkpoint,
            program,
            kv_cache_dtype,
            path: resolved.path,
            entry: resolved.entry,
            template,
        })
    }

    /// Reads the weights into `backend` while another thread builds the tokenizer, which takes about as long.
    pub(crate) fn load(self, args: &ComposeArgs, backend: &mut dyn Backend) -> Result<LoadedModel> {
        let Self { checkpoint, program, encoder, path, entry, template, .. } = self;
        let text = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("octavo-text".into());
            let text = thread.spawn_scoped(scope, || text_model(args, &checkpoint, &path, template.as_ref()))?;
            let weights = load_weights(&program, &checkpoint, backend)
                .and_then(|()| encoder.as_ref().map_or(Ok(()), |encoder| load_encoder(encoder, &checkpoint, backend)));
            let text = text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            weights.map(|()| text)
        })?;
        let generation = checkpoint.generation_config();
        let defaults =
            generation::defaults(&args.sampling, generation, entry.and_then(|entry| entry.sampling.as_ref()))?;
        if let Some(line) = defaults.described() {
            info!("{line}");
        }
        Ok(LoadedModel {
            eos_token_ids: generation.eos_token_ids.clone(),
            sampling_defaults: defaults.sampling,
            program: Arc::new(program),
            text,
            vision: encoder.map(|(_, vision)| vision),
            checkpoint,
        })
    }
}

/// Reads the weights into `backend` and reports the progress on a terminal or in the log.
fn load_weights(program: &Program, checkpoint: &Checkpoint, backend: &mut dyn Backend) -> Result<()> {
    let begun = Instant::now();
    reading("loading weights", program, checkpoint, |source, advance| backend.load(program, source, advance))?;
    let (memory, seconds) = (human_bytes(backend.weight_bytes()), begun.elapsed().as_secs_f64());
    let how = if checkpoint.is_dummy() { "generated" } else { "read" };
    info!("weights: {memory} in memory, {how} in {seconds:.3} s");
    if checkpoint.is_dummy() {
        warn!("--load-format dummy: the weights are random, so the answers are meaningless");
    }
    Ok(())
}

/// Loads the weights of a program with `load`, which gets their source and reports how many bytes it has read.
fn reading(
    label: &str,
    program: &Program,
    checkpoint: &Checkpoint,
    load: impl FnOnce(&dyn WeightSource, &mut dyn FnMut(u64)) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let made_up = checkpoint.is_dummy().then(|| DummyWeights::new(program));
    let source: &dyn WeightSource = made_up.as_ref().map_or(checkpoint, |weights| weights);
    let progress = pull::progress();
    let task = progress.begin(label, Some(program.weight_bytes()));
    load(source, &mut |bytes| task.advance_to(bytes))?;
    task.finish();
    Ok(())
}

/// Reads the weights of the encoder into `backend`. A backend without encoders is an error: a server that was meant to
/// take images would refuse them one by one.
fn load_encoder(
    (program, vision): &(Program, Vision),
    checkpoint: &Checkpoint,
    backend: &mut dyn Backend,
) -> Result<()> {
    let loaded = reading("loading the image encoder", program, checkpoint, |source, advance| {
        backend.load_encoder(program, source, advance)
    });
    match loaded {
        Err(BackendError::Unsupported { backend, what }) => bail!(
            "the {backend} backend does not support {what}, which the image encoder needs: serve the model with --device cpu, \
             or without images with --language-model-only"
        ),
        loaded => loaded?,
    }
    info!("images: an image takes at most {} tokens", vision.largest_image());
    Ok(())
}

/// Tokenizer and chat template. `path` is the model's, for errors about what is in its files.
fn text_model(
    args: &ComposeArgs,
    checkpoint: &Checkpoint,
    path: &Path,
    given: Option<&GivenTemplate>,
) -> Result<TextModel> {
    let tokenizer = match checkpoint.is_dummy() && !checkpoint.has_tokenizer() {
        true => stand_in::tokenizer(checkpoint.config().vocab_size)?,
        false => tokenizer(checkpoint.tokenizer()?).with_context(|| path.display().to_string())?,
    };
    let tokenizer = Arc::new(tokenizer);
    let template = template(given, checkpoint, tokenizer.special())?;
    if template.is_none() && checkpoint.config().vectors.is_none() {
        warn!("chat requests will be refused; set a chat template with --chat-template");
    }
    let template = match args.chat.chat_template_content_format {
        None => template,
        Some(format) => template.map(|template| template.with_content_format(format)),
    };
    Ok(TextModel { tokenizer, template: template.map(Arc::new), images: None })
}

/// Builds the tokenizer that a checkpoint carries.
pub(crate) fn tokenizer(data: TokenizerData<'_>) -> Result<Tokenizer> {
    let tokenizer = match data {
        TokenizerData::Json { tokenizer_json, bos, eos, unk, pad, add_bos, add_eos } => {
            Tokenizer::from_json(&tokenizer_json, SpecialTokens { bos, eos, unk, pad, add_bos, add_eos })?
        }
        TokenizerData::Gguf(g) => Tokenizer::from_gguf(&GgufVocabulary {
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
fn template(
    given: Option<&GivenTemplate>,
    checkpoint: &Checkpoint,
    special: &SpecialTokens,
) -> Result<Option<ChatTemplate>> {
    if let Some(GivenTemplate { source, name }) = given {
        return Ok(Some(ChatTemplate::new(source, special).with_context(|| name.clone())?));
    }
    let Some(source) = checkpoint.chat_template() else {
        info!("the model has no chat template");
        return Ok(None);
    };
    match ChatTemplate::new(source, special) {
        Ok(template) => Ok(Some(template)),
        Err(error) => {
            warn!("the model's chat template does not compile: {error}");
            Ok(None)
        }
    }
}

/// The content of the file `given`, or `given` itself if there is no such file and it reads like a template.
fn given_template(given: &str) -> Result<GivenTemplate> {
    match std::fs::read_to_string(given) {
        Ok(source) => Ok(GivenTemplate { source, name: format!("--chat-template {given}") }),
        Err(_) if given.contains(['{', '}', '\n']) => {
            Ok(GivenTemplate { source: given.to_owned(), name: "--chat-template".to_owned() })
        }
        Err(error) => bail!("--chat-template {given}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_a_file_or_itself() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{{ messages }}").unwrap();
        let path = file.path().to_str().unwrap();
        assert_eq!(given_template(path).unwrap().source, "{{ messages }}");
        assert_eq!(given_template("{% for m in messages %}").unwrap().source, "{% for m in messages %}");
        let error = given_template("/no/such/template.jinja").err().unwrap().to_string();
        assert!(error.starts_with("--chat-template /no/such/template.jinja: "), "{error}");
    }
}
