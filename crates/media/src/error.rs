//! Why an image cannot be used.

/// Why an image of a request cannot be used. The messages are vLLM's where vLLM has one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MediaError {
    /// The source is neither an HTTP, data nor file URL.
    #[error("The URL must be either a HTTP, data or file URL.")]
    Scheme,
    /// The host, or that of a redirect, is not among the allowed domains.
    #[error("The URL must be from one of the allowed domains: {}. Input URL domain: {domain}", list(.allowed))]
    Domain {
        /// Domains that are allowed.
        allowed: Vec<String>,
        /// Domain of the URL.
        domain: String,
    },
    /// A data URL has no comma.
    #[error("Invalid data URL '{start}': missing ',' separator.")]
    DataUrl {
        /// The first characters of the URL.
        start: String,
    },
    /// A data URL is not marked as base64.
    #[error("Only base64 data URLs are supported for now.")]
    DataEncoding,
    /// The server has no folder of local images.
    #[error("Cannot load local files without `--allowed-local-media-path`.")]
    LocalFiles,
    /// A file lies outside the folder of local images.
    #[error("The file path {path} must be a subpath of `--allowed-local-media-path {folder}`.")]
    LocalPath {
        /// The path in the URL.
        path: String,
        /// The folder.
        folder: String,
    },
    /// A host did not deliver the image.
    #[error("Failed to fetch media from URL: {0}")]
    Fetch(String),
    /// The bytes are not an image that can be decoded.
    #[error("Failed to load image: {0}")]
    Image(String),
    /// The image has too many pixels.
    #[error(
        "Image dimensions {width}x{height} ({} pixels) exceed the maximum of {max} pixels. \
         Set VLLM_MAX_IMAGE_PIXELS to increase this limit.",
        area(.width, .height)
    )]
    Pixels {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// Maximum number of pixels.
        max: u64,
    },
    /// The image is too long for its other side.
    #[error("absolute aspect ratio must be smaller than 200, got {ratio}")]
    AspectRatio {
        /// The longer side divided by the shorter one, as Python prints it.
        ratio: String,
    },
    /// The processed images of all requests take all the memory that they may take.
    #[error("the images of other requests take all the memory for images")]
    Busy,
    /// A part has a `uuid` and no image, and no image of that name is cached.
    #[error("No image with the uuid '{uuid}' is cached; the request must contain the image.")]
    NotCached {
        /// The name.
        uuid: String,
    },
}

impl MediaError {
    /// The HTTP status of a response with this error: 422 if a host did not deliver the image, 429 if there is no memory
    /// for it at the moment, otherwise 400.
    #[must_use]
    pub fn status(&self) -> u16 {
        match self {
            Self::Fetch(_) => 422,
            Self::Busy => 429,
            _ => 400,
        }
    }
}

fn area(width: &u32, height: &u32) -> u64 {
    u64::from(*width) * u64::from(*height)
}

/// A list as Python prints it.
fn list(items: &[String]) -> String {
    let items: Vec<_> = items.iter().map(|item| format!("'{item}'")).collect();
    format!("[{}]", items.join(", "))
}

/// Why settings cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The folder of local images is missing or is no folder.
    #[error("--allowed-local-media-path {path}: {reason}")]
    Folder {
        /// The folder.
        path: String,
        /// The reason.
        reason: String,
    },
    /// The file of certificate authorities cannot be used.
    #[error("{path}: {reason}")]
    Authorities {
        /// The file.
        path: String,
        /// The reason.
        reason: String,
    },
    /// A parameter of an image processor is impossible.
    #[error("{field} of the image processor {reason}")]
    Processor {
        /// Name of the parameter.
        field: &'static str,
        /// The reason.
        reason: String,
    },
}
