//! `octavo pull`: a model into the cache. `octavo list`: the models that are there.

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow};
use octavo_models::catalog::{self, CatalogEntry, DEFAULT_MODEL, DeviceKind, Gpu};
use octavo_models::{HubError, InstalledModel, Progress, ResolveError, ResolveOptions, ResolvedModel, installed};

use crate::cli::{ListArgs, LoadFormat, PullArgs, SourceArgs};
use crate::signals;
use crate::system::human_bytes;
use crate::table::aligned;

/// The purpose of a resolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The model is to be run: one whose architecture is not implemented is refused before it is downloaded.
    Served,
    /// The model is only to be downloaded.
    Any,
}

pub(crate) fn run(args: &PullArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    signals::end_first_process()?;
    if args.list {
        let text = match args.model.as_deref() {
            None => catalog_table(&installed(&options(&args.source))),
            Some(name) => details(catalog::find(name).with_context(|| unlisted(name))?),
        };
        print!("{text}");
        return Ok(());
    }
    let wanted = if args.force { Wanted::Any } else { Wanted::Served };
    let reference = args.model.as_deref().unwrap_or(DEFAULT_MODEL);
    let model = resolve(reference, &args.source, LoadFormat::Auto, wanted);
    let model = model.map_err(|error| match error.downcast_ref() {
        Some(ResolveError::Hub(HubError::NotServed { .. })) => {
            anyhow!("{error}; --force downloads it anyway")
        }
        _ => error,
    })?;
    println!("{}", model.path.display());
    Ok(())
}

/// Lists the models on disk.
pub(crate) fn list(args: &ListArgs) -> Result<()> {
    let source = SourceArgs { download_dir: args.download_dir.clone(), ..SourceArgs::default() };
    let models = installed(&options(&source));
    if models.is_empty() {
        eprintln!("no models on disk; `octavo pull MODEL` downloads one and `octavo pull --list` lists the catalog");
    } else {
        print!("{}", models_table(&models, SystemTime::now()));
    }
    Ok(())
}

/// The options of a resolution: the environment's, then the flags'.
fn options(source: &SourceArgs) -> ResolveOptions {
    let mut options = ResolveOptions::from_env();
    options.revision.clone_from(&source.revision);
    options.offline |= source.offline;
    if let Some(token) = &source.hf_token {
        options.hub.token = Some(token.clone());
    }
    if let Some(folder) = &source.download_dir {
        options.hub.cache_dir.clone_from(folder);
    }
    options
}

/// Finds a model's file or directory, and downloads it if necessary.
pub(crate) fn resolve(
    reference: &str,
    source: &SourceArgs,
    format: LoadFormat,
    wanted: Wanted,
) -> Result<ResolvedModel> {
    let progress = progress();
    let mut options = options(source);
    options.without_weights = format == LoadFormat::Dummy;
    options.require_served = wanted == Wanted::Served;
    Ok(octavo_models::resolve(reference, &options, progress.as_ref())?)
}

/// Finds a model for inspection, without its weights: none are downloaded from the hub, and a folder needs none.
pub(crate) fn resolve_shape(reference: &str, source: &SourceArgs) -> Result<ResolvedModel> {
    resolve(reference, source, LoadFormat::Dummy, Wanted::Served)
}

/// A bar on a terminal, log lines elsewhere.
pub(crate) fn progress() -> Box<dyn Progress> {
    octavo_models::progress_for(std::io::stderr().is_terminal())
}

/// The catalog by family, with what is on disk of it.
fn catalog_table(models: &[InstalledModel]) -> String {
    let yes = |is: bool, yes: &str| if is { yes.to_owned() } else { "-".to_owned() };
    let mut entries: Vec<&CatalogEntry> = catalog::entries().iter().collect();
    // The family of the default model comes first.
    entries.sort_by_key(|entry| catalog::entries().iter().position(|first| first.architecture == entry.architecture));
    let rows = entries.into_iter().map(|entry| {
        let on_disk = models.iter().any(|model| model.entry.is_some_and(|of| of.id == entry.id));
        [
            entry.architecture.clone(),
            entry.id.clone(),
            entry.name.clone(),
            human_bytes(entry.download_bytes()),
            yes(on_disk, "on disk"),
            yes(entry.gated, "gated"),
        ]
    });
    let heading = ["FAMILY", "NAME", "MODEL", "DOWNLOAD", "ON DISK", "ACCESS"].map(str::to_owned);
    aligned(&std::iter::once(heading).chain(rows).collect::<Vec<_>>())
}

/// A model of the catalog.
fn details(entry: &CatalogEntry) -> String {
    let access = if entry.gated { ", given to accounts that accepted its terms" } else { "" };
    let mut rows = vec![
        ["name".to_owned(), format!("{} ({})", entry.id, entry.name)],
        ["family".to_owned(), entry.architecture.clone()],
        ["licence".to_owned(), format!("{}{access}: {}", entry.licence, entry.licence_url)],
        ["parameters".to_owned(), format!("{:.1} M", entry.parameters as f64 / 1e6)],
        ["context".to_owned(), format!("{} tokens", entry.context)],
    ];
    let need = entry.memory_need(DeviceKind::Cuda, entry.context);
    let (weights, kv) = (human_bytes(need.weights), human_bytes(need.kv));
    rows.push([
        "memory".to_owned(),
        format!("{weights} of weights, {kv} of KV cache for the whole context in 16 bits"),
    ]);
    rows.extend(entry.sources.iter().map(|source| ["source".to_owned(), source.to_string()]));
    rows.extend(Gpu::ALL.map(|gpu| {
        let command = |flags: &String| format!("octavo serve {} {flags}", entry.id).trim_end().to_owned();
        let fits = entry.flags.get(&gpu).map(command);
        [gpu.name().to_owned(), fits.unwrap_or_else(|| "too small; Octavo uses one GPU".to_owned())]
    }));
    aligned(&rows)
}

/// The reason why a model has no details.
fn unlisted(name: &str) -> String {
    let similar = match catalog::similar(name).as_slice() {
        [] => String::new(),
        names => format!(" (similar: {})", names.join(", ")),
    };
    format!("'{name}' is not in the catalog{similar}; `octavo pull --list` lists it")
}

fn models_table(models: &[InstalledModel], now: SystemTime) -> String {
    let rows = models.iter().map(|model| {
        let age = model.modified.map(|modified| age(now.duration_since(modified).unwrap_or_default()));
        [model.name.clone(), human_bytes(model.bytes), age.unwrap_or_else(|| "-".to_owned()), short(&model.path)]
    });
    let heading = ["NAME", "SIZE", "MODIFIED", "PATH"].map(str::to_owned);
    aligned(&std::iter::once(heading).chain(rows).collect::<Vec<_>>())
}

/// `3 days ago`.
fn age(age: Duration) -> String {
    const UNITS: [(u64, &str); 6] = [
        (31_536_000, "year"),
        (2_592_000, "month"),
        (604_800, "week"),
        (86_400, "day"),
        (3600, "hour"),
        (60, "minute"),
    ];
    let seconds = age.as_secs();
    match UNITS.iter().find(|(unit, _)| seconds >= *unit) {
        Some((unit, name)) => {
            let count = seconds / unit;
            format!("{count} {name}{} ago", if count == 1 { "" } else { "s" })
        }
        None => "just now".to_owned(),
    }
}

/// A path below the home directory, written with `~`.
fn short(path: &Path) -> String {
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
    match home.and_then(|home| path.strip_prefix(home).ok().map(Path::to_owned)) {
        Some(rest) => format!("~/{}", rest.display()),
        None => path.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_in_the_largest_unit() {
        for (seconds, expected) in [
            (0, "just now"),
            (59, "just now"),
            (60, "1 minute ago"),
            (7_200, "2 hours ago"),
            (86_400, "1 day ago"),
            (3_000_000, "1 month ago"),
            (70_000_000, "2 years ago"),
        ] {
            assert_eq!(age(Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn the_catalog_says_what_is_on_disk_and_gated() {
        let default = catalog::find(DEFAULT_MODEL).unwrap();
        let model = InstalledModel {
            name: default.id.clone(),
            entry: Some(default),
            bytes: 7,
            modified: Some(SystemTime::UNIX_EPOCH),
            path: "/m.gguf".into(),
        };
        let table = catalog_table(std::slice::from_ref(&model));
        let line = |name: &str| table.lines().find(|line| line.contains(&format!("  {name}"))).unwrap().to_owned();
        assert_eq!(table.lines().count(), catalog::entries().len() + 1);
        let words = |name: &str| line(name).split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        let size = human_bytes(default.download_bytes());
        assert!(words(DEFAULT_MODEL).ends_with(&format!("{size} on disk -")), "{table}");
        assert!(words("mistral-7b").starts_with("mistral mistral-7b") && words("mistral-7b").ends_with("- gated"));
        // The models of a family are together.
        let mut families: Vec<&str> = table.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
        families.dedup();
        let distinct: std::collections::BTreeSet<_> = families.iter().collect();
        assert_eq!(families.len(), distinct.len(), "{table}");
        assert_eq!(families[..2], ["FAMILY", "llama"]);
        let day = SystemTime::UNIX_EPOCH + Duration::from_secs(86_400);
        assert!(models_table(&[model], day).ends_with("7 B   1 day ago  /m.gguf\n"));
    }

    #[test]
    fn the_details_of_a_model_have_its_flags() {
        let text = details(catalog::find("google/gemma-3-4b-it").unwrap());
        for line in [
            "licence     Gemma Terms of Use, given to accounts that accepted its terms: https://ai.google.dev/gemma/terms",
            "V100 16 GB  octavo serve gemma-3-4b-it --dtype half --max-model-len 25600",
            "H100 80 GB  octavo serve gemma-3-4b-it",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        let large = details(catalog::find("qwen3-30b-a3b").unwrap());
        assert!(large.contains("L40S 48 GB  too small; Octavo uses one GPU\n"), "{large}");
        let error = unlisted("gemma3-4b");
        assert!(error.starts_with("'gemma3-4b' is not in the catalog (similar: gemma-3-4b-it, "), "{error}");
    }
}
