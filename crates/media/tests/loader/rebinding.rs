//! Names whose addresses change while they are used.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;
use futures::future::BoxFuture;
use octavo_media::MediaLoader;
use octavo_media::fetch::Resolver;

use super::common::server::{Reply, Server, file, redirect, status};
use super::common::{Lookups, load, png, refused, settings};

/// The address of the server that may be reached.
const PUBLIC: &str = "127.0.0.2";

/// The address of the server that may not be reached.
const PRIVATE: &str = "127.0.0.3";

/// Answers with the next addresses at every question, and with the last ones forever.
#[derive(Clone)]
struct Changing {
    answers: Arc<[&'static [&'static str]]>,
    questions: Arc<AtomicUsize>,
}

impl Changing {
    fn new(answers: &[&'static [&'static str]]) -> Self {
        Self { answers: answers.into(), questions: Arc::default() }
    }

    fn questions(&self) -> usize {
        self.questions.load(Ordering::Relaxed)
    }
}

impl Resolver for Changing {
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        assert_eq!(host, "rebind.example");
        let question = self.questions.fetch_add(1, Ordering::Relaxed);
        let answer = self.answers[question.min(self.answers.len() - 1)];
        async move { Ok(answer.iter().map(|address| address.parse().unwrap()).collect()) }.boxed()
    }
}

/// A server at each of the two addresses, with the same port.
async fn servers(answer: impl Fn(&str, usize) -> Reply + Send + Sync + 'static) -> [Server; 2] {
    let public = Server::start_at(&format!("{PUBLIC}:0"), answer).await;
    let private = Server::start_at(&format!("{PRIVATE}:{}", public.port()), |_, _| file(&png(9, 9, 2))).await;
    [public, private]
}

fn loader(resolver: &Changing) -> MediaLoader {
    let mut settings = settings();
    settings.fetch.private_networks = vec![PUBLIC.parse().unwrap()];
    MediaLoader::with_resolver(settings, Lookups::default(), resolver.clone()).unwrap()
}

fn image(port: u16) -> String {
    format!("http://rebind.example:{port}/x.png")
}

const NOT_PUBLIC: &str = "Failed to fetch media from URL: the host rebind.example has an address that is not public";

#[tokio::test]
async fn a_connection_goes_to_the_address_that_was_checked() {
    let [public, private] = servers(|_, _| file(&png(9, 9, 1))).await;
    let resolver = Changing::new(&[&[PUBLIC], &[PRIVATE]]);
    let loader = loader(&resolver);
    assert!(load(&loader, &image(public.port())).await.is_ok());
    assert_eq!((resolver.questions(), public.connections()), (1, 1), "the name is resolved once");
    assert_eq!(refused(&loader, &image(public.port())).await, (422, NOT_PUBLIC.to_owned()));
    assert_eq!((resolver.questions(), public.connections(), private.connections()), (2, 1, 0));
}

#[tokio::test]
async fn a_name_is_checked_again_after_each_redirect() {
    let [public, private] = servers(|_, before| if before < 2 { redirect("/again") } else { status(404) }).await;
    let resolver = Changing::new(&[&[PUBLIC], &[PUBLIC], &[PRIVATE]]);
    assert_eq!(refused(&loader(&resolver), &image(public.port())).await, (422, NOT_PUBLIC.to_owned()));
    assert_eq!((resolver.questions(), public.connections(), private.connections()), (3, 2, 0));
}

#[tokio::test]
async fn a_name_is_checked_again_before_each_attempt() {
    let [public, private] = servers(|_, _| status(503)).await;
    let resolver = Changing::new(&[&[PUBLIC], &[PRIVATE]]);
    assert_eq!(refused(&loader(&resolver), &image(public.port())).await, (422, NOT_PUBLIC.to_owned()));
    assert_eq!((resolver.questions(), public.connections(), private.connections()), (2, 1, 0));
}

#[tokio::test]
async fn one_address_that_is_not_public_spoils_a_name() {
    let [public, private] = servers(|_, _| file(&png(9, 9, 1))).await;
    for answer in
        [&[PUBLIC, PRIVATE][..], &[PRIVATE, PUBLIC], &[PUBLIC, "::ffff:127.0.0.3"], &[PUBLIC, "64:ff9b::a00:1"]]
    {
        let answer: &'static [&'static str] = answer.to_vec().leak();
        let resolver = Changing::new(&[answer]);
        assert_eq!(refused(&loader(&resolver), &image(public.port())).await, (422, NOT_PUBLIC.to_owned()));
    }
    assert_eq!((public.connections(), private.connections()), (0, 0));
}
