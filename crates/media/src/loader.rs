//! From the image part of a request to its patches.

use std::sync::Arc;

use crate::budget::Budget;
use crate::cache::Cache;
use crate::decode::{decode, inspect};
use crate::error::{MediaError, SettingsError};
use crate::fetch::{FetchSettings, Fetcher, File, is_inline};
use crate::flight::Flights;
use crate::identity::Identity;
use crate::patches::Patches;
use crate::processor::ImageProcessor;
use crate::workers::{Cancel, Workers, off_thread};

/// The settings of a [`MediaLoader`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaSettings {
    /// Name of the model, a part of every identity.
    pub model: String,
    /// Where images may come from.
    pub fetch: FetchSettings,
    /// Largest number of pixels of an image (`VLLM_MAX_IMAGE_PIXELS`). 0 means no limit.
    pub max_pixels: u64,
    /// Images that are decoded at the same time (`VLLM_MEDIA_LOADING_THREAD_COUNT`).
    pub threads: usize,
    /// Memory of processed images that are kept, in bytes (`--mm-processor-cache-gb`).
    pub cache_bytes: u64,
    /// Memory of the files that are being fetched or wait to be decoded, in bytes.
    pub file_bytes: u64,
    /// Memory of the images that are being decoded, in bytes. A larger image is decoded alone.
    pub decoding_bytes: u64,
}

impl Default for MediaSettings {
    fn default() -> Self {
        Self {
            model: String::new(),
            fetch: FetchSettings::default(),
            max_pixels: 178_956_970,
            threads: 8,
            cache_bytes: 4 << 30,
            file_bytes: 512 << 20,
            decoding_bytes: 2 << 30,
        }
    }
}

/// Is told what happens, to count it.
pub trait MediaObserver: Send + Sync + 'static {
    /// An image was looked up in the cache of processed images.
    fn queried(&self, hit: bool);
}

/// An image that a request refers to.
#[derive(Clone, Debug)]
pub struct ImageRequest {
    /// An `http:`, `https:`, `data:` or `file:` URL. It may be missing if `uuid` names an image that is cached.
    pub source: Option<Arc<str>>,
    /// The name that the client gives to the image. It stands for the content.
    pub uuid: Option<Arc<str>>,
    /// What is done to the image.
    pub processor: Arc<ImageProcessor>,
}

/// An image as an encoder reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessedImage {
    /// Name of the image in every cache.
    pub identity: Identity,
    /// Its pixels.
    pub patches: Patches,
}

type Outcome = Result<Arc<ProcessedImage>, MediaError>;

/// Loads images, and remembers those that were used last.
///
/// Dropping the future of [`load`](Self::load) cancels the work, unless another request waits for the same image. The
/// handle is cheap to clone.
#[derive(Clone)]
pub struct MediaLoader(Arc<Inner>);

struct Inner {
    settings: MediaSettings,
    fetcher: Fetcher,
    decoding: Budget,
    workers: Workers,
    cache: Cache,
    /// Fetches in progress by source and processor.
    sources: Flights<[u8; 32], Outcome>,
    /// Images that are being processed, by identity.
    images: Flights<[u8; 32], Outcome>,
    observer: Box<dyn MediaObserver>,
}

impl std::fmt::Debug for MediaLoader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MediaLoader").field("settings", &self.0.settings).finish_non_exhaustive()
    }
}

impl MediaLoader {
    /// # Errors
    /// The folder of local images or the certificate authorities cannot be used.
    pub fn new(settings: MediaSettings, observer: impl MediaObserver) -> Result<Self, SettingsError> {
        let fetcher = Fetcher::new(settings.fetch.clone(), Budget::new(settings.file_bytes))?;
        Ok(Self(Arc::new(Inner {
            fetcher,
            decoding: Budget::new(settings.decoding_bytes),
            workers: Workers::new(settings.threads),
            cache: Cache::new(settings.cache_bytes),
            sources: Flights::new(),
            images: Flights::new(),
            observer: Box::new(observer),
            settings,
        })))
    }

    /// Memory of the cached images in bytes.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        self.0.cache.bytes()
    }

    /// Fetches, decodes and processes an image, or takes it from the cache.
    ///
    /// # Errors
    /// The image cannot be used; the error says why and which status a response has.
    pub async fn load(&self, request: ImageRequest) -> Outcome {
        let inner = &self.0;
        if let Some(uuid) = &request.uuid {
            let identity = Identity::of_uuid(&inner.settings.model, &request.processor, uuid);
            let cached = inner.cached(&identity);
            if let Some(image) = cached {
                return Ok(image);
            }
            if request.source.is_none() {
                return Err(MediaError::NotCached { uuid: uuid.to_string() });
            }
        }
        let Some(source) = request.source else {
            return Err(MediaError::Scheme);
        };
        let inline = is_inline(&source);
        let work = Arc::clone(inner).fetch_and_process(
            Arc::clone(&source),
            request.uuid.clone(),
            Arc::clone(&request.processor),
        );
        if inline {
            return work.await;
        }
        // Equal requests share the download. A URL is fetched again by later ones, because its content may change.
        let name = format!("{}\0{source}", request.uuid.as_deref().unwrap_or_default());
        inner.sources.run(Identity::of_uuid("", &request.processor, &name).digest(), work).await
    }
}

impl Inner {
    fn cached(&self, identity: &Identity) -> Option<Arc<ProcessedImage>> {
        let found = self.cache.get(&identity.digest());
        self.observer.queried(found.is_some());
        found
    }

    async fn fetch_and_process(
        self: Arc<Self>,
        source: Arc<str>,
        uuid: Option<Arc<str>>,
        processor: Arc<ImageProcessor>,
    ) -> Outcome {
        let file = self.fetcher.fetch(&source).await?;
        drop(source);
        let identity = match uuid {
            Some(uuid) => Identity::of_uuid(&self.settings.model, &processor, &uuid),
            None => {
                let (inner, bytes, of) = (Arc::clone(&self), file.bytes.clone(), Arc::clone(&processor));
                let identity = off_thread(move || Identity::of_bytes(&inner.settings.model, &of, &bytes)).await?;
                if let Some(image) = self.cached(&identity) {
                    return Ok(image);
                }
                identity
            }
        };
        let work = Arc::clone(&self).process(file, identity.clone(), processor);
        self.images.run(identity.digest(), work).await
    }

    async fn process(self: Arc<Self>, file: File, identity: Identity, processor: Arc<ImageProcessor>) -> Outcome {
        let (bytes, max_pixels) = (file.bytes.clone(), self.settings.max_pixels);
        let header = off_thread(move || inspect(&bytes, max_pixels)).await??;
        let (width, height) = processor.resized(header.width, header.height)?;
        // Between the passes the image has one old side and one new side; then it exists resized and as patches.
        let between = width.max(height) as u64 * u64::from(header.width.max(header.height));
        let resizing = 3 * (between + 2 * width as u64 * height as u64);
        let lease = self.decoding.reserve(header.decoding_bytes() + resizing).await;
        let work = move |cancel: &Cancel| {
            if cancel.is_set() {
                return Ok(None);
            }
            let image = decode(&file.bytes, &header, processor.background)?;
            drop(file);
            processor.process(image, &|| cancel.is_set())
        };
        let patches = self.workers.run(lease, work).await?;
        // Nobody is left to read this error.
        let patches = patches.ok_or_else(|| MediaError::Image("the request was cancelled".to_owned()))?;
        let image = Arc::new(ProcessedImage { identity, patches });
        self.cache.insert(&image);
        Ok(image)
    }
}
