//! A server to ask: over HTTP, or in this process.

use anyhow::{Context, Result, bail};
use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use octavo_http_client::{Certificates, Connection, EventReader, Target};
use serde_json::Value;
use tower::ServiceExt;

/// Bytes of an answer that is read whole.
const MAX_WHOLE: usize = 4 << 20;

/// Who answers, and under which name.
pub(crate) struct Client {
    route: Route,
    model: String,
}

enum Route {
    Remote(Box<Remote>),
    /// Its paths begin with `/v1`.
    Local(Router),
}

struct Remote {
    url: String,
    /// The server itself, without the path of its API.
    root: Target,
    /// Its paths follow those of the URL.
    connection: Connection,
}

/// A piece of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// Of the answer itself.
    Content(&'a str),
    /// Of what the model thinks before it.
    Reasoning(&'a str),
}

impl Client {
    /// The server at `url`, asked for `model` or for its first one. An encrypted one has one of the `certificates`.
    ///
    /// # Errors
    /// The URL cannot be used, or nobody answers there.
    pub(crate) async fn connect(
        url: &str,
        api_key: Option<&str>,
        certificates: &Certificates,
        model: Option<&str>,
    ) -> Result<Self> {
        let mut client = Self { model: model.unwrap_or_default().to_owned(), ..Self::at(url, api_key, certificates)? };
        if model.is_none() {
            let models: Value = serde_json::from_slice(&client.whole(Method::GET, "/models").await?)?;
            let first = models["data"][0]["id"].as_str();
            client.model = first.with_context(|| format!("{url} serves no model"))?.to_owned();
        }
        Ok(client)
    }

    /// The server at `url`, which is not asked yet. Requests need a model from [`Self::connect`].
    ///
    /// # Errors
    /// The URL cannot be used.
    pub(crate) fn at(url: &str, api_key: Option<&str>, certificates: &Certificates) -> Result<Self> {
        let connection = Connection::new(Target::new(&with_path(url), api_key, certificates)?);
        let root = Target::new(root_of(url), api_key, certificates)?;
        let remote = Remote { url: url.to_owned(), root, connection };
        Ok(Self { route: Route::Remote(Box::new(remote)), model: String::new() })
    }

    /// The server of this process.
    pub(crate) fn local(router: Router, model: &str) -> Self {
        Self { route: Route::Local(router), model: model.to_owned() }
    }

    /// The name that requests carry.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// Forgets a connection whose answer is not wanted any more: the server then stops as well.
    pub(crate) fn disconnect(&mut self) {
        if let Route::Remote(remote) = &mut self.route {
            remote.connection.close();
        }
    }

    /// Asks for a streamed answer and hands its pieces to `take`, until that says false.
    ///
    /// # Errors
    /// Nobody answers, the server refuses, or the answer breaks off; says what the server said.
    pub(crate) async fn stream(
        &mut self,
        path: &str,
        request: &Value,
        mut take: impl FnMut(Piece<'_>) -> bool,
    ) -> Result<()> {
        let mut body = self.send(Method::POST, path, Bytes::from(serde_json::to_vec(request)?)).await?;
        let mut events = EventReader::default();
        let mut state = State::Open;
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.context("the answer broke off")?.into_data() else { continue };
            events.push(&data, |payload| {
                if matches!(state, State::Open) {
                    state = event(payload, &mut take);
                }
            });
            match state {
                State::Open => {}
                State::Done => return Ok(()),
                State::Failed(message) => bail!("the server gave up: {message}"),
            }
        }
        bail!("the answer broke off: the server closed the connection")
    }

    /// Gets `path`, which begins at the server's root and not at `/v1`.
    ///
    /// # Errors
    /// Nobody answers, or the server refuses.
    pub(crate) async fn get(&mut self, path: &str) -> Result<Bytes> {
        let response = match &self.route {
            Route::Remote(remote) => {
                let Remote { url, root, .. } = &**remote;
                let mut connection = Connection::new(root.clone());
                let request = connection.target().request(Method::GET, path, Bytes::new())?;
                let response = connection.send(request).await;
                response.map(|response| response.map(Body::new)).with_context(|| format!("{url} does not answer"))?
            }
            Route::Local(router) => local(router, Method::GET, path, Bytes::new()).await?,
        };
        whole(accepted(response).await?).await
    }

    /// An answer that is small.
    async fn whole(&mut self, method: Method, path: &str) -> Result<Bytes> {
        let body = self.send(method, path, Bytes::new()).await?;
        whole(body).await
    }

    /// Sends a request; an answer without success is an error.
    async fn send(&mut self, method: Method, path: &str, body: Bytes) -> Result<Body> {
        let response = match &mut self.route {
            Route::Remote(remote) => {
                let Remote { url, connection, .. } = &mut **remote;
                let request = connection.target().request(method, path, body)?;
                let response = connection.send(request).await;
                response.map(|response| response.map(Body::new)).with_context(|| format!("{url} does not answer"))?
            }
            Route::Local(router) => local(router, method, &format!("/v1{path}"), body).await?,
        };
        accepted(response).await
    }
}

async fn local(router: &Router, method: Method, path: &str, body: Bytes) -> Result<Response<Body>> {
    let request = Request::builder().method(method).uri(path);
    let request = request.header(CONTENT_TYPE, "application/json").body(Body::from(body))?;
    match router.clone().oneshot(request).await {
        Ok(response) => Ok(response),
        Err(never) => match never {},
    }
}

/// How a stream stands.
enum State {
    Open,
    /// Its end was announced, or nobody takes it any more.
    Done,
    Failed(String),
}

/// Reads one event.
fn event(payload: &[u8], take: &mut impl FnMut(Piece<'_>) -> bool) -> State {
    if payload == b"[DONE]" {
        return State::Done;
    }
    let Ok(event) = serde_json::from_slice::<Value>(payload) else {
        return State::Failed(format!("'{}' is not JSON", String::from_utf8_lossy(payload)));
    };
    if event.get("error").is_some_and(|error| !error.is_null()) {
        return State::Failed(message(&event));
    }
    let choice = &event["choices"][0];
    let delta = &choice["delta"];
    let reasoning = delta["reasoning"].as_str().or(delta["reasoning_content"].as_str());
    let content = delta["content"].as_str().or(choice["text"].as_str());
    let pieces = [reasoning.map(Piece::Reasoning), content.map(Piece::Content)];
    for piece in pieces.into_iter().flatten() {
        if !take(piece) {
            return State::Done;
        }
    }
    State::Open
}

async fn accepted(response: Response<Body>) -> Result<Body> {
    let (head, body) = response.into_parts();
    if head.status.is_success() {
        return Ok(body);
    }
    let bytes = whole(body).await.unwrap_or_default();
    let told = match serde_json::from_slice::<Value>(&bytes) {
        Ok(value) => message(&value),
        Err(_) => String::from_utf8_lossy(&bytes).trim().to_owned(),
    };
    let hint = match head.status {
        StatusCode::UNAUTHORIZED => "; give the key with --api-key",
        // No route, as opposed to no model.
        StatusCode::NOT_FOUND if told.is_empty() || told == "Not Found" => {
            "; is this the URL of an OpenAI-compatible API, with /v1 at its end?"
        }
        _ => "",
    };
    bail!("the server answered {}: {told}{hint}", head.status)
}

async fn whole(body: Body) -> Result<Bytes> {
    let collected = Limited::new(body, MAX_WHOLE).collect().await;
    Ok(collected.map_err(|error| anyhow::anyhow!("the answer broke off: {error}"))?.to_bytes())
}

/// What an error body says.
fn message(body: &Value) -> String {
    let told = body["error"]["message"].as_str().or(body["error"].as_str()).or(body["detail"].as_str());
    told.map_or_else(|| body.to_string(), str::to_owned)
}

/// The URL of the server itself, without the path of its API.
pub(crate) fn root_of(url: &str) -> &str {
    let url = url.trim_end_matches('/');
    url.strip_suffix("/v1").unwrap_or(url)
}

/// A URL without a path means the usual one.
fn with_path(url: &str) -> String {
    let url = url.trim_end_matches('/');
    match url.split_once("://") {
        Some((_, rest)) if !rest.is_empty() && !rest.contains('/') => format!("{url}/v1"),
        _ => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_without_a_path_gets_the_usual_one() {
        for (url, expected) in [
            ("http://h:1", "http://h:1/v1"),
            ("http://h:1/", "http://h:1/v1"),
            ("http://h/v1/", "http://h/v1"),
            ("http://h/openai/v1", "http://h/openai/v1"),
            ("nonsense", "nonsense"),
        ] {
            assert_eq!(with_path(url), expected);
        }
    }

    #[test]
    fn events_are_pieces_an_end_or_an_error() {
        let read = |payload: &str| {
            let mut pieces = vec![];
            let state = event(payload.as_bytes(), &mut |piece| {
                pieces.push(format!("{piece:?}"));
                true
            });
            (pieces, state)
        };
        assert_eq!(read(r#"{"choices":[{"delta":{"content":"a"}}]}"#).0, [r#"Content("a")"#]);
        assert_eq!(read(r#"{"choices":[{"delta":{"reasoning":"b"}}]}"#).0, [r#"Reasoning("b")"#]);
        assert_eq!(read(r#"{"choices":[{"text":"c"}]}"#).0, [r#"Content("c")"#]);
        assert!(read(r#"{"choices":[],"usage":{}}"#).0.is_empty());
        assert!(matches!(read("[DONE]").1, State::Done));
        assert!(matches!(read(r#"{"error":{"message":"m"}}"#).1, State::Failed(told) if told == "m"));
        assert!(matches!(read("{").1, State::Failed(_)));
    }
}
