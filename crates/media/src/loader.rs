//! From the image part of a request to the patches of its views.

use std::sync::Arc;

use crate::budget::{Budget, Lease};
use crate::cache::Cache;
use crate::decode::{decode, inspect};
use crate::error::{MediaError, SettingsError};
use crate::fetch::{FetchSettings, Fetcher, File, Resolver, SystemResolver, is_inline};
use crate::flight::Flights;
use crate::identity::{Identity, name_key, source_key};
use crate::processor::ImageProcessor;
use crate::views::Views;
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
    /// Images that are decoded at the same time (`VLLM_MEDIA_LOADING_THREAD_COUNT`), at most one for each processor.
    pub threads: usize,
    /// Memory of processed images that are kept, in bytes (`--mm-processor-cache-gb`).
    pub cache_bytes: u64,
    /// Memory of the files that are being fetched or wait to be decoded, in bytes. One more file, of at most
    /// `fetch.max_bytes`, may come on top: it is what remains possible when all other memory is used.
    pub file_bytes: u64,
    /// Memory of the images that are being decoded, in bytes. A larger image is decoded alone.
    pub decoding_bytes: u64,
    /// Memory of all processed images: those of requests that have not ended, and those that are kept beside them.
    pub processed_bytes: u64,
}

impl Default for MediaSettings {
    fn default() -> Self {
        Self {
            model: String::new(),
            fetch: FetchSettings::default(),
            max_pixels: 178_956_970,
            threads: 8,
            cache_bytes: 4 << 30,
            file_bytes: 256 << 20,
            decoding_bytes: 2 << 30,
            processed_bytes: 8 << 30,
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
    /// The name that the client gives to the image. Later requests of the same scope may have the name alone.
    pub uuid: Option<Arc<str>>,
    /// The clients that share names.
    pub scope: Option<Arc<str>>,
    /// What is done to the image.
    pub processor: Arc<ImageProcessor>,
}

/// An image as an encoder reads it.
#[derive(Debug)]
pub struct ProcessedImage {
    /// Name of the image in every cache.
    pub identity: Identity,
    /// Its pixels.
    pub views: Views,
    /// Their part of the memory for processed images.
    _lease: Option<Lease>,
}

impl ProcessedImage {
    pub(crate) fn new(identity: Identity, views: Views, lease: Option<Lease>) -> Self {
        Self { identity, views, _lease: lease }
    }
}

impl PartialEq for ProcessedImage {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity && self.views == other.views
    }
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
    processed: Budget,
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
        Self::with_resolver(settings, observer, SystemResolver)
    }

    /// As [`new`](Self::new), with a resolver of one's own.
    ///
    /// # Errors
    /// As those of [`new`](Self::new).
    pub fn with_resolver(
        settings: MediaSettings,
        observer: impl MediaObserver,
        resolver: impl Resolver,
    ) -> Result<Self, SettingsError> {
        let fetcher = Fetcher::new(settings.fetch.clone(), settings.file_bytes, Arc::new(resolver))?;
        Ok(Self(Arc::new(Inner {
            fetcher,
            decoding: Budget::new(settings.decoding_bytes),
            processed: Budget::new(settings.processed_bytes),
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
        let name = request
            .uuid
            .as_ref()
            .map(|uuid| name_key(&request.processor, request.scope.as_deref().unwrap_or_default(), uuid));
        let image = match (&request.source, &request.uuid) {
            (Some(source), _) => inner.fetched(source, &request.processor).await?,
            (None, Some(uuid)) => {
                let known = name.and_then(|name| inner.cache.named(&name)).and_then(|digest| inner.cached(&digest));
                known.ok_or_else(|| MediaError::NotCached { uuid: uuid.to_string() })?
            }
            (None, None) => return Err(MediaError::Scheme),
        };
        if let Some(name) = name {
            inner.cache.name(name, &image.identity);
        }
        Ok(image)
    }
}

impl Inner {
    fn cached(&self, digest: &[u8; 32]) -> Option<Arc<ProcessedImage>> {
        let found = self.cache.get(digest);
        self.observer.queried(found.is_some());
        found
    }

    async fn fetched(self: &Arc<Self>, source: &Arc<str>, processor: &Arc<ImageProcessor>) -> Outcome {
        let work = Arc::clone(self).fetch_and_process(Arc::clone(source), Arc::clone(processor));
        if is_inline(source) {
            return work.await;
        }
        // Equal requests share the download. A URL is fetched again by later ones, because its content may change.
        self.sources.run(source_key(processor, source), work).await
    }

    async fn fetch_and_process(self: Arc<Self>, source: Arc<str>, processor: Arc<ImageProcessor>) -> Outcome {
        let file = self.fetcher.fetch(&source).await?;
        drop(source);
        let (inner, bytes, of) = (Arc::clone(&self), file.bytes.clone(), Arc::clone(&processor));
        let identity = off_thread(move || Identity::new(&inner.settings.model, &of, &bytes)).await?;
        if let Some(image) = self.cached(&identity.digest()) {
            return Ok(image);
        }
        let work = Arc::clone(&self).process(file, identity, processor);
        self.images.run(identity.digest(), work).await
    }

    /// Reserves memory for a processed image, in place of others that are kept but not used if necessary.
    fn reserve(&self, bytes: u64) -> Result<Lease, MediaError> {
        loop {
            match self.processed.take(bytes) {
                Some(lease) => return Ok(lease),
                None if self.cache.evict() => {}
                None => return Err(MediaError::Busy),
            }
        }
    }

    async fn process(self: Arc<Self>, file: File, identity: Identity, processor: Arc<ImageProcessor>) -> Outcome {
        let (bytes, max_pixels) = (file.bytes.clone(), self.settings.max_pixels);
        let header = off_thread(move || inspect(&bytes, max_pixels)).await??;
        let decoded = (header.width as usize, header.height as usize);
        let plan = processor.plan(decoded.0, decoded.1)?;
        let held = self.reserve(plan.patch_bytes(processor.layout))?;
        let working = plan.working_bytes(decoded, processor.layout);
        let lease = self.decoding.reserve(header.decoding_bytes() + working).await;
        let work = move |cancel: &Cancel| {
            if cancel.is_set() {
                return Ok(None);
            }
            let image = decode(&file.bytes, &header, processor.background)?;
            drop(file);
            // An image that the file says to turn has another plan, with the sides swapped.
            processor.process(image, &|| cancel.is_set())
        };
        let views = self.workers.run(lease, work).await?;
        // Nobody is left to read this error.
        let views = views.ok_or_else(|| MediaError::Image("the request was cancelled".to_owned()))?;
        let image = Arc::new(ProcessedImage::new(identity, views, Some(held)));
        self.cache.insert(&image);
        Ok(image)
    }
}
