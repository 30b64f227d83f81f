//! Flags of images in requests.

use std::path::PathBuf;

use clap::Args;
use octavo_media::fetch::Network;

use crate::cli::values::{self, JsonObject, TextList};

/// Where images come from, and how many there may be.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Images")]
pub(crate) struct MediaArgs {
    /// Maximum number of images in a prompt, as {"image": N}; 0 leaves the encoder out [default: 999].
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) limit_mm_per_prompt: Option<JsonObject>,

    /// Changes of the image processor's settings.
    ///
    /// {"max_pixels": 1003520} makes larger images smaller, so that they take fewer tokens. For models that cut images into
    /// tiles, {"size": {"longest_edge": 1024}} has the same effect, and {"do_image_splitting": false} leaves one square.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) mm_processor_kwargs: Option<JsonObject>,

    /// Size of the cache of processed images in GiB; 0 disables it.
    #[arg(long, value_parser = values::gibibytes, default_value = "4", value_name = "GIB")]
    pub(crate) mm_processor_cache_gb: u64,

    /// Folder whose images requests may name with `file:` URLs.
    #[arg(long, value_name = "DIR")]
    pub(crate) allowed_local_media_path: Option<PathBuf>,

    /// Hosts that images may be fetched from [default: all with a public address].
    #[arg(long, num_args = 1.., value_parser = values::text_list, value_name = "HOST")]
    pub(crate) allowed_media_domains: Vec<TextList>,

    /// Networks with private addresses that images may be fetched from, such as 10.0.0.0/8.
    #[arg(long, num_args = 1.., value_name = "NETWORK")]
    pub(crate) allowed_media_networks: Vec<Network>,

    /// Leave the image encoder out; requests with images are refused.
    #[arg(long)]
    pub(crate) language_model_only: bool,
}
