//! Helpers of the end-to-end tests: the real binary as a child process, and requests to it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Maximum time to load the default model on a slow machine.
const START: Duration = Duration::from_secs(120);

/// A running `octavo serve` on a free port of the loopback interface. It is killed when dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    base: String,
    /// Log lines before it was ready.
    start: String,
    log: mpsc::Receiver<String>,
    client: reqwest::Client,
    has_ended: bool,
}

impl Server {
    /// Starts `binary serve MODEL ARGS` and waits until it is ready.
    ///
    /// # Panics
    /// Panics if the server ends or does not become ready; the message contains its log.
    pub fn start(binary: &Path, model: &Path, args: &[&str]) -> Server {
        Self::start_in(binary, model, args, &[])
    }

    /// Does the same with environment variables.
    ///
    /// # Panics
    /// Panics in the same cases as [`Server::start`].
    pub fn start_in(binary: &Path, model: &Path, args: &[&str], variables: &[(&str, &Path)]) -> Server {
        let mut command = Command::new(binary);
        command.arg("serve").arg(model).args(["--served-model-name", "default"]).args(args);
        command.envs(variables.iter().copied());
        Self::spawn(command, "listening on ")
    }

    /// Starts the server with a model of the hub at `endpoint`, and returns while it still loads the model.
    ///
    /// # Panics
    /// Panics if the server ends before it binds its port.
    pub fn start_loading(binary: &Path, endpoint: &str) -> Server {
        let mut command = Command::new(binary);
        command.args(["serve", "some/model"]).env("HF_ENDPOINT", endpoint);
        Self::spawn(command, "probes answer on ")
    }

    /// Starts the server on a free port and waits for the log line that contains the address after `announcement`.
    fn spawn(mut command: Command, announcement: &str) -> Server {
        command.args(["--host", "127.0.0.1", "--port", "0"]);
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("octavo starts");
        let stderr = child.stderr.take().expect("stderr is piped");
        let (send, log) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let deadline = Instant::now() + START;
        let mut seen = String::new();
        let base = loop {
            match log.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Some((_, address)) = line.split_once(announcement) {
                        break address.trim().to_owned();
                    }
                    seen.push_str(&line);
                    seen.push('\n');
                }
                Err(_) => {
                    child.kill().ok();
                    panic!("octavo did not become ready; its log:\n{seen}");
                }
            }
        };
        let client = reqwest::Client::builder().no_proxy().build().expect("an HTTP client");
        Server { child, base, start: seen, log, client, has_ended: false }
    }

    /// Returns `http://127.0.0.1:PORT` with `path` appended.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the client that the helpers use.
    pub fn client(&self) -> &reqwest::Client {
        &self.client
    }

    /// Returns status and body of a GET.
    pub async fn get(&self, path: &str) -> (u16, String) {
        let response = self.client.get(self.url(path)).send().await.expect("an answer");
        (response.status().as_u16(), response.text().await.expect("a body"))
    }

    /// Returns status and JSON body of a POST.
    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let response = self.client.post(self.url(path)).json(body).send().await.expect("an answer");
        (response.status().as_u16(), response.json().await.unwrap_or(Value::Null))
    }

    /// Returns a greedy completion's text and its log-probabilities; `extra` is merged into the request.
    ///
    /// # Panics
    /// Panics if the status is not 200.
    pub async fn complete(&self, prompt: &str, extra: &Value) -> Completion {
        let mut body = json!({"model": "default", "prompt": prompt, "temperature": 0, "logprobs": 0});
        let fields = extra.as_object().expect("an object");
        body.as_object_mut().expect("an object").extend(fields.clone());
        let (status, answer) = self.post("/v1/completions", &body).await;
        assert_eq!(status, 200, "{answer}");
        let choice = &answer["choices"][0];
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().cloned().unwrap_or_default();
        Completion {
            text: choice["text"].as_str().expect("text").to_owned(),
            logprobs: logprobs.iter().map(|v| v.as_f64().expect("a log-probability")).collect(),
            finish: choice["finish_reason"].as_str().expect("a finish reason").to_owned(),
        }
    }

    /// Returns the sum of a metric's series whose labels contain `labels`.
    pub async fn metric(&self, name: &str, labels: &str) -> f64 {
        let (status, text) = self.get("/metrics").await;
        assert_eq!(status, 200);
        let of_name = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
        let series = text.lines().filter(of_name).filter(|line| line.contains(labels));
        series.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Waits until the sum of a metric's series with `labels` is at least `least`.
    ///
    /// # Panics
    /// Panics after a minute.
    pub async fn reaches(&self, name: &str, labels: &str, least: f64) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let value = self.metric(name, labels).await;
            if value >= least {
                return;
            }
            assert!(Instant::now() < deadline, "{name} of {labels} is still {value}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until no request runs or waits and no KV block is used.
    ///
    /// # Panics
    /// Panics after a minute.
    pub async fn idle(&self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let running = self.metric("vllm:num_requests_running", "").await;
            let waiting = self.metric("vllm:num_requests_waiting", "").await;
            let used = self.metric("vllm:kv_cache_usage_perc", "").await;
            if running + waiting + used == 0.0 {
                return;
            }
            assert!(Instant::now() < deadline, "still busy: {running} running, {waiting} waiting, KV usage {used}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Sends a signal by name (`TERM`, `INT`).
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").arg(format!("-{name}")).arg(self.pid().to_string()).status();
        assert!(status.expect("kill runs").success());
    }

    /// Waits for the process to end by itself.
    ///
    /// # Panics
    /// Panics if it does not end within `limit`.
    pub async fn ended(&mut self, limit: Duration) -> ExitStatus {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().expect("the child can be waited for") {
                self.has_ended = true;
                return status;
            }
            assert!(Instant::now() < deadline, "the server did not end within {limit:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Returns the log lines until it was ready.
    pub fn start_log(&self) -> &str {
        &self.start
    }

    /// Waits until a line of the log contains a text, and returns the lines up to it that no earlier call has returned.
    ///
    /// # Panics
    /// Panics after a minute.
    pub async fn logs(&self, text: &str) -> Vec<String> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut lines = Vec::new();
        loop {
            match self.log.try_recv() {
                Ok(line) => {
                    let is_it = line.contains(text);
                    lines.push(line);
                    if is_it {
                        return lines;
                    }
                }
                Err(_) => {
                    assert!(Instant::now() < deadline, "no line has '{text}': {lines:?}");
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
    }

    /// Returns the log lines since it was ready: all of them if it has ended, or else those read so far.
    pub fn log(&self) -> Vec<String> {
        if self.has_ended {
            // The lines are read on another thread, which ends a moment after the process.
            return std::iter::from_fn(|| self.log.recv_timeout(START).ok()).collect();
        }
        self.log.try_iter().collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // This fails only if the process has already ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// A completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The text.
    pub text: String,
    /// Log-probability of each token; equal bits mean equal arithmetic.
    pub logprobs: Vec<f64>,
    /// Finish reason: `stop`, `length`, ...
    pub finish: String,
}
