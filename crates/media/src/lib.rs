//! Images of requests: from a URL to the patches that an encoder reads.
//!
//! [`MediaLoader`] fetches an image ([`fetch`]), names it by its content ([`Identity`]), decodes it ([`decode`]), and
//! turns it into the patches of one or more [`Views`] as an [`ImageProcessor`] describes ([`resize`]). Processed images
//! are cached, and equal images that are requested at the same time are processed once.
//!
//! Everything here distrusts its input: sizes are checked before memory is reserved, the memory of all images in flight
//! is bounded, and an address is checked before a connection is made to it.

mod budget;
mod cache;
pub mod decode;
mod error;
pub mod fetch;
mod flight;
mod identity;
mod image;
mod loader;
mod patches;
mod processor;
pub mod resize;
mod views;
mod workers;

pub use error::{MediaError, SettingsError};
pub use identity::Identity;
pub use image::RgbImage;
pub use loader::{ImageRequest, MediaLoader, MediaObserver, MediaSettings, ProcessedImage};
pub use patches::{Grid, Patches};
pub use processor::{ImageProcessor, Normalize, PatchLayout, SizeRule};
pub use views::{Plan, Tiles, View, Views};
