//! A stand-in for the hub on 127.0.0.1, with one thread and one request per connection. It stops when dropped.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use sha2::{Digest, Sha256};

/// A received request.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
}

/// Faulty answer to one request. Each is used once, in order.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// Answers with this status and headers, without content.
    Status(u16, Vec<(&'static str, &'static str)>),
    /// Closes the connection after this many bytes of the content.
    Cut(usize),
    /// Answers 200 with the whole file, whatever range was requested.
    NoRanges,
    /// Answers 416.
    RefuseRange,
}

/// A repository: commits by revision, and the files of every commit.
#[derive(Clone, Debug, Default)]
pub(crate) struct Repo {
    pub(crate) revisions: BTreeMap<String, String>,
    pub(crate) files: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// Names that the listing contains without a file.
    pub(crate) claimed: Vec<String>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) repos: BTreeMap<String, Repo>,
    /// Faults of requests whose path ends with the key.
    pub(crate) faults: Vec<(&'static str, Fault)>,
    /// Files that are announced with a wrong SHA-256.
    pub(crate) lies: Vec<String>,
    /// Whether large files come from `/cdn/`, as on the real hub.
    pub(crate) cdn: bool,
    /// Origin of the CDN, if it is another server.
    pub(crate) cdn_origin: Option<String>,
    pub(crate) seen: Vec<Seen>,
}

impl State {
    /// Returns the SHA-256 announced for a file.
    fn digest(&self, name: &str, content: &[u8]) -> String {
        let lies = self.lies.iter().any(|lie| lie == name);
        sha256(if lies { b"something else" } else { content })
    }
}

/// Size from which files are "large": their etag is their SHA-256.
pub(crate) const LARGE: usize = 1000;

pub(crate) struct Hub {
    pub(crate) state: Arc<Mutex<State>>,
    address: std::net::SocketAddr,
    prefix: &'static str,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hub {
    pub(crate) fn start() -> Hub {
        Hub::behind("")
    }

    /// Starts a hub under a path, like a mirror behind a gateway.
    pub(crate) fn behind(prefix: &'static str) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, stopped) = (Arc::clone(&state), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                // Disconnects of clients are ignored.
                let _ = stream.and_then(|stream| answer(stream, &shared, prefix));
            }
        });
        Hub { state, address, prefix, stop, thread: Some(thread) }
    }

    pub(crate) fn origin(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("{}{}", self.origin(), self.prefix)
    }

    /// Adds files to `repo` at `commit` and points `main` at it.
    pub(crate) fn publish(&self, repo: &str, commit: &str, files: &[(&str, &[u8])]) {
        let mut state = self.state.lock().unwrap();
        let repo = state.repos.entry(repo.to_owned()).or_default();
        repo.revisions.insert("main".to_owned(), commit.to_owned());
        repo.revisions.insert(commit.to_owned(), commit.to_owned());
        let at = repo.files.entry(commit.to_owned()).or_default();
        at.extend(files.iter().map(|(name, content)| ((*name).to_owned(), content.to_vec())));
    }

    pub(crate) fn fault(&self, path_end: &'static str, fault: Fault) {
        self.state.lock().unwrap().faults.push((path_end, fault));
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.state.lock().unwrap().seen.clone()
    }

    /// Counts the requests of `method` whose path ends with `path_end`.
    pub(crate) fn count(&self, method: &str, path_end: &str) -> usize {
        self.seen().iter().filter(|seen| seen.method == method && seen.path.ends_with(path_end)).count()
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // The connection wakes the listener.
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Number of bytes of the body that are sent.
    sent: usize,
}

impl Reply {
    fn new(status: u16, body: Vec<u8>) -> Reply {
        let sent = body.len();
        Reply { status, headers: Vec::new(), body, sent }
    }

    fn with(mut self, name: &str, value: impl ToString) -> Reply {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }
}

fn answer(stream: TcpStream, state: &Mutex<State>, prefix: &str) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let (Some(method), Some(path)) = (words.next(), words.next()) else {
        return Ok(());
    };
    let mut headers = BTreeMap::new();
    for line in reader.lines() {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let seen = Seen { method: method.to_owned(), path: path.to_owned(), headers };
    let reply = reply_to(&seen, &mut state.lock().unwrap(), prefix);
    send(stream, method, &reply)
}

fn send(mut stream: TcpStream, method: &str, reply: &Reply) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {} X\r\nconnection: close\r\n", reply.status);
    if !reply.headers.iter().any(|(name, _)| name == "content-length") {
        head.push_str(&format!("content-length: {}\r\n", reply.body.len()));
    }
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    stream.write_all(head.as_bytes())?;
    stream.write_all(b"\r\n")?;
    if method != "HEAD" {
        stream.write_all(&reply.body[..reply.sent])?;
    }
    stream.flush()
}

fn reply_to(seen: &Seen, state: &mut State, prefix: &str) -> Reply {
    state.seen.push(seen.clone());
    let hit = state.faults.iter().position(|(end, fault)| {
        // A cut applies to the content, not to the answer to HEAD.
        seen.path.ends_with(end) && (seen.method == "GET" || matches!(fault, Fault::Status(..)))
    });
    let fault = hit.map(|at| state.faults.remove(at).1);
    if let Some(Fault::Status(status, headers)) = fault {
        return headers.iter().fold(Reply::new(status, Vec::new()), |reply, (name, value)| reply.with(name, value));
    }
    if matches!(fault, Some(Fault::RefuseRange)) {
        return Reply::new(416, Vec::new());
    }
    let Some(path) = seen.path.strip_prefix(prefix) else {
        return Reply::new(404, Vec::new());
    };
    let mut reply = route(path, seen, state, matches!(fault, Some(Fault::NoRanges)));
    if let Some(Fault::Cut(at)) = fault {
        reply.sent = reply.sent.min(at);
    }
    reply
}

fn route(path: &str, seen: &Seen, state: &State, ignore_range: bool) -> Reply {
    if let Some(rest) = path.strip_prefix("/api/models/") {
        let Some((repo, revision)) = rest.split_once("/revision/") else {
            return Reply::new(404, Vec::new());
        };
        return listing(state, repo, &revision.replace("%2F", "/"));
    }
    let (path, from_cdn) = match path.strip_prefix("/cdn") {
        Some(path) => (path, true),
        None => (path, false),
    };
    let Some((repo, rest)) = path.trim_start_matches('/').split_once("/resolve/") else {
        return Reply::new(404, Vec::new());
    };
    let Some((commit, name)) = rest.split_once('/') else {
        return Reply::new(404, Vec::new());
    };
    let content = state.repos.get(repo).and_then(|repo| repo.files.get(commit)).and_then(|files| files.get(name));
    let Some(content) = content else {
        return Reply::new(404, Vec::new()).with("x-error-code", "EntryNotFound");
    };
    let (large, digest) = (content.len() >= LARGE, state.digest(name, content));
    let reply = if large && state.cdn && !from_cdn {
        Reply::new(302, Vec::new())
            .with("location", format!("{}/cdn{path}", state.cdn_origin.as_deref().unwrap_or("")))
            .with("x-linked-etag", format!("\"{digest}\""))
            .with("x-linked-size", content.len())
    } else {
        let range = seen.headers.get("range").filter(|_| !ignore_range);
        let etag = if large { &digest } else { &digest[..40] };
        part_of(content, range.map(String::as_str)).with("etag", format!("\"{etag}\""))
    };
    reply.with("x-repo-commit", commit)
}

fn listing(state: &State, repo: &str, revision: &str) -> Reply {
    let Some(repo) = state.repos.get(repo) else {
        return Reply::new(404, Vec::new()).with("x-error-code", "RepoNotFound");
    };
    let Some(commit) = repo.revisions.get(revision) else {
        return Reply::new(404, Vec::new()).with("x-error-code", "RevisionNotFound");
    };
    let names = repo.files[commit].keys().chain(&repo.claimed);
    let siblings: Vec<_> = names.map(|name| serde_json::json!({"rfilename": name})).collect();
    Reply::new(200, serde_json::json!({"sha": commit, "siblings": siblings}).to_string().into_bytes())
}

/// Returns the content, or the part requested by a header `bytes=FROM-`.
fn part_of(content: &[u8], range: Option<&str>) -> Reply {
    let from = range.map(|range| range.trim_start_matches("bytes=").trim_end_matches('-').parse::<usize>().unwrap());
    match from {
        Some(from) if from >= content.len() => Reply::new(416, Vec::new()),
        Some(from) => {
            let range = format!("bytes {from}-{}/{}", content.len() - 1, content.len());
            Reply::new(206, content[from..].to_vec()).with("content-range", range)
        }
        None => Reply::new(200, content.to_vec()),
    }
}
