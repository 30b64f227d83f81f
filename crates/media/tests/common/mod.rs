//! The server and the images of these tests.

#![allow(dead_code, reason = "each program of tests needs a part of it")]

pub(crate) mod server;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use octavo_media::fetch::FetchSettings;
use octavo_media::resize::Filter;
use octavo_media::{
    ImageProcessor, ImageRequest, MediaError, MediaLoader, MediaObserver, MediaSettings, Normalize, PatchLayout,
    ProcessedImage, SizeRule,
};
use tokio::task::JoinHandle;

/// Counts lookups and hits.
#[derive(Clone, Default)]
pub(crate) struct Lookups(Arc<[AtomicUsize; 2]>);

impl Lookups {
    pub(crate) fn counted(&self) -> [usize; 2] {
        [0, 1].map(|i| self.0[i].load(Ordering::Relaxed))
    }
}

impl MediaObserver for Lookups {
    fn queried(&self, hit: bool) {
        self.0[0].fetch_add(1, Ordering::Relaxed);
        self.0[1].fetch_add(usize::from(hit), Ordering::Relaxed);
    }
}

/// Images of any size become 8x8 pixels or more.
pub(crate) fn processor() -> Arc<ImageProcessor> {
    Arc::new(ImageProcessor {
        background: [255; 3],
        size: SizeRule::Area { min: 64, max: 4096 },
        filter: Filter::Bicubic,
        normalize: Normalize { rescale: 1.0 / 255.0, mean: [0.5; 3], std: [0.5; 3] },
        layout: PatchLayout { patch: 4, merge: 2, frames: 2 },
    })
}

/// Settings that allow the server of the tests, with pauses that cost no time.
pub(crate) fn settings() -> MediaSettings {
    let fetch = FetchSettings {
        timeout: Duration::from_secs(60),
        pause: Duration::from_millis(1),
        private_networks: vec!["127.0.0.1".parse().unwrap(), "::1".parse().unwrap()],
        ..FetchSettings::default()
    };
    MediaSettings { model: "model".to_owned(), fetch, threads: 2, ..MediaSettings::default() }
}

/// Room for two files of 4 MiB beside the one that is always possible.
pub(crate) fn narrow() -> MediaSettings {
    let mut settings = MediaSettings { file_bytes: 8 << 20, ..settings() };
    (settings.fetch.max_bytes, settings.fetch.patience) = (4 << 20, Duration::from_millis(50));
    settings
}

pub(crate) fn loader(settings: MediaSettings) -> MediaLoader {
    MediaLoader::new(settings, Lookups::default()).unwrap()
}

pub(crate) fn request(source: &str) -> ImageRequest {
    ImageRequest { source: Some(source.into()), uuid: None, scope: None, processor: processor() }
}

/// An image that is being loaded.
pub(crate) type Load = JoinHandle<Result<Arc<ProcessedImage>, MediaError>>;

pub(crate) async fn load(loader: &MediaLoader, source: &str) -> Result<Arc<ProcessedImage>, MediaError> {
    loader.load(request(source)).await
}

/// Starts to load as many images of a server, `/0` and so on.
pub(crate) fn start_loads(loader: &MediaLoader, server: &server::Server, count: usize) -> Vec<Load> {
    let start = |number| {
        let (loader, url) = (loader.clone(), server.url(&format!("/{number}")));
        tokio::spawn(async move { load(&loader, &url).await })
    };
    (0..count).map(start).collect()
}

/// Loads an image that cannot be used, and returns the status and the message.
pub(crate) async fn refused(loader: &MediaLoader, source: &str) -> (u16, String) {
    let error = load(loader, source).await.expect_err(source);
    (error.status(), error.to_string())
}

/// A grey PNG file whose pixels are `value`, except for the first ones, which hold `name`.
pub(crate) fn png(width: u32, height: u32, name: u32) -> Vec<u8> {
    let mut file = vec![];
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Grayscale);
    let mut pixels = vec![128; (width * height) as usize];
    for (pixel, byte) in pixels.iter_mut().zip(name.to_le_bytes()) {
        *pixel = byte;
    }
    encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
    file
}

pub(crate) fn data_url(file: &[u8]) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(file))
}
