//! Equal images are processed once, and images that were used are kept.

use std::collections::HashSet;
use std::sync::Arc;

use futures::future::join_all;
use octavo_media::{
    ImageProcessor, ImageRequest, MediaError, MediaLoader, MediaSettings, PatchLayout, SizeRule, Tiles,
};

use super::common::server::{Server, file};
use super::common::{Lookups, data_url, load, loader, png, processor, request, settings};

#[tokio::test]
async fn a_hundred_clients_fetch_one_image_once() {
    let server = Server::start(|_, _| file(&png(30, 20, 1))).await;
    let lookups = Lookups::default();
    let loader = MediaLoader::new(settings(), lookups.clone()).unwrap();
    let url = server.url("/x.png");
    let images = join_all((0..100).map(|_| load(&loader, &url))).await;
    assert!(images.iter().all(|image| image == &images[0] && image.is_ok()));
    assert_eq!((server.requests(), lookups.counted()), (1, [1, 0]));
    load(&loader, &url).await.unwrap();
    assert_eq!((server.requests(), lookups.counted()), (2, [2, 1]), "the content may have changed");
}

#[tokio::test]
async fn an_image_is_found_by_its_content() {
    let server = Server::start(|_, _| file(&png(30, 20, 1))).await;
    let lookups = Lookups::default();
    let loader = MediaLoader::new(settings(), lookups.clone()).unwrap();
    let first = load(&loader, &server.url("/x.png")).await.unwrap();
    let second = load(&loader, &data_url(&png(30, 20, 1))).await.unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    assert_ne!(load(&loader, &data_url(&png(30, 20, 2))).await.unwrap().identity, first.identity);
    let mut other = request(&data_url(&png(30, 20, 1)));
    let layout = PatchLayout { frames: 1, ..processor().layout };
    other.processor =
        ImageProcessor { layout, size: SizeRule::Area { min: 64, max: 64 }, ..(*processor()).clone() }.into();
    assert_ne!(loader.load(other).await.unwrap().identity, first.identity, "the processor is part of the name");
    assert_eq!(lookups.counted(), [4, 1]);
}

#[tokio::test]
async fn a_uuid_names_an_image_that_need_not_be_sent_again() {
    let loader = loader(settings());
    let named = |source: Option<String>, scope: &str| ImageRequest {
        source: source.map(Into::into),
        uuid: Some("logo".into()),
        scope: Some(scope.into()),
        processor: processor(),
    };
    let unknown = MediaError::NotCached { uuid: "logo".to_owned() };
    assert_eq!(loader.load(named(None, "a")).await.unwrap_err(), unknown);
    let image = loader.load(named(Some(data_url(&png(30, 20, 1))), "a")).await.unwrap();
    assert_eq!(loader.load(named(None, "a")).await.unwrap(), image);
    assert_eq!(loader.load(named(None, "b")).await.unwrap_err(), unknown, "another client gave no such name");
    let other = loader.load(named(Some(data_url(&png(30, 20, 2))), "a")).await.unwrap();
    assert_ne!(other.identity, image.identity, "the file counts, whatever its name");
    assert_eq!(loader.load(named(None, "a")).await.unwrap(), other);
}

#[tokio::test]
async fn images_in_use_are_bounded_and_kept_ones_give_way() {
    let one = 3 * 32 * 24;
    let loader = loader(MediaSettings { processed_bytes: 4 * one, ..settings() });
    let source = |name| data_url(&png(32, 24, name));
    for name in 0..20 {
        load(&loader, &source(name)).await.unwrap();
    }
    let mut used = vec![];
    let refused = loop {
        match load(&loader, &source(100 + used.len() as u32)).await {
            Ok(image) => used.push(image),
            Err(error) => break error,
        }
    };
    assert_eq!((refused.clone(), refused.status()), (MediaError::Busy, 429));
    assert!((1..=4).contains(&used.len()), "{}", used.len());
    drop(used);
    load(&loader, &source(7)).await.unwrap();
}

#[tokio::test]
async fn all_views_of_an_image_count_as_its_memory() {
    // Two rows of three tiles of 32 pixels, and the whole image.
    let processor: Arc<_> =
        ImageProcessor { size: SizeRule::Tiles { longest: 96, side: 32 }, ..(*processor()).clone() }.into();
    let request = |name| ImageRequest { processor: Arc::clone(&processor), ..request(&data_url(&png(30, 20, name))) };
    let image = 7 * 3 * 32 * 32;
    let loader = loader(MediaSettings { processed_bytes: 2 * image + 5000, ..settings() });
    let first = loader.load(request(1)).await.unwrap();
    assert_eq!((first.views.tiles(), first.views.bytes()), (Tiles { rows: 2, columns: 3 }, image));
    let names: HashSet<_> = (0..7).map(|view| first.identity.of_view(view)).collect();
    assert_eq!(names.len(), 7);
    let second = loader.load(request(2)).await.unwrap();
    assert_eq!(loader.load(request(3)).await.unwrap_err(), MediaError::Busy);
    drop(second);
    loader.load(request(3)).await.unwrap();
    assert!(loader.cached_bytes() > image, "the cache counts them, too");
}
