use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Json;
use axum::routing::post;
use serde_json::{Value, json};

use super::*;

/// A folder with an input of `n` requests, the line after the first being invalid.
struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new(lines: &[String]) -> Self {
        let files = Self { folder: tempfile::tempdir().unwrap() };
        std::fs::write(files.input(), lines.join("\n")).unwrap();
        files
    }

    fn input(&self) -> PathBuf {
        self.folder.path().join("in.jsonl")
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("out.jsonl")
    }

    fn partial(&self) -> PathBuf {
        self.folder.path().join("out.jsonl.partial")
    }

    /// The batch; `None` if it is complete.
    fn batch(&self) -> Result<Option<Batch>> {
        Ok(match Batch::open(&self.input(), &self.output())? {
            Opened::Unfinished(batch) => Some(batch),
            Opened::Complete(_) => None,
        })
    }

    async fn run(&self, router: &Router) -> Failures {
        let mut batch = self.batch().unwrap().unwrap();
        batch.answer(router.clone(), 4).await.unwrap();
        batch.finish().unwrap()
    }

    fn answers(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.output()).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn request(id: usize) -> String {
    json!({"custom_id": format!("r{id}"), "method": "POST", "url": "/v1/echo", "body": {"id": id, "x": 0.1}})
        .to_string()
}

fn requests(n: usize) -> Vec<String> {
    (0..n).map(request).collect()
}

/// Echoes bodies, later ones sooner; counts requests and how many ran at once.
fn echo(asked: &Arc<AtomicUsize>, most: &Arc<AtomicUsize>) -> Router {
    let (asked, most, now) = (Arc::clone(asked), Arc::clone(most), Arc::new(AtomicUsize::new(0)));
    let handler = move |Json(body): Json<Value>| {
        let (asked, most, now) = (Arc::clone(&asked), Arc::clone(&most), Arc::clone(&now));
        async move {
            asked.fetch_add(1, Ordering::SeqCst);
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let id = body["id"].as_u64().unwrap();
            tokio::time::sleep(Duration::from_millis(8 - id % 4 * 2)).await;
            now.fetch_sub(1, Ordering::SeqCst);
            Json(body)
        }
    };
    Router::new().route("/v1/echo", post(handler))
}

#[tokio::test]
async fn answers_keep_the_order_and_few_run_at_once() {
    let (asked, most) = Default::default();
    let files = Files::new(&requests(40));
    files.run(&echo(&asked, &most)).await;
    let answers = files.answers();
    assert_eq!(answers.len(), 40);
    for (id, answer) in answers.iter().enumerate() {
        assert_eq!(answer["custom_id"], format!("r{id}"));
        assert_eq!(answer["response"]["status_code"], 200);
        assert_eq!(answer["response"]["body"], json!({"id": id, "x": 0.1}));
        assert_eq!(answer["error"], Value::Null);
        assert!(answer["id"].as_str().unwrap().starts_with("batch_req_"));
        assert_eq!(answer["response"]["request_id"].as_str().unwrap().len(), 32);
    }
    assert_eq!(asked.load(Ordering::SeqCst), 40);
    assert!((2..=4).contains(&most.load(Ordering::SeqCst)), "{most:?}");
    assert!(!files.partial().exists());
}

#[tokio::test]
async fn what_is_wrong_with_a_line_is_its_answer() {
    let mut lines = requests(2);
    lines.insert(1, "{torn".into());
    lines.push(r#"{"custom_id":"get","method":"GET","url":"/v1/echo","body":{}}"#.into());
    lines.push(r#"{"custom_id":"lost","method":"POST","url":"/v1/nowhere","body":{}}"#.into());
    lines.push(r#"{"custom_id":"space","method":"POST","url":"/v1/a b","body":{}}"#.into());
    let files = Files::new(&lines);
    let failures = files.run(&echo(&Default::default(), &Default::default())).await.to_string();
    assert!(failures.starts_with("4 requests failed: line 2: line 2 is not a JSON object"), "{failures}");
    assert!(failures.contains(", line 5 (custom_id 'lost'): status 404 Not Found, "), "{failures}");
    let answers = files.answers();
    let status: Vec<_> = answers.iter().map(|answer| answer["response"]["status_code"].as_u64().unwrap()).collect();
    assert_eq!(status, [200, 400, 200, 400, 404, 400]);
    assert_eq!(answers[1]["custom_id"], Value::Null);
    assert!(answers[1]["error"]["message"].as_str().unwrap().starts_with("line 2 is not a JSON object"));
    assert_eq!(answers[3]["error"], answers[3]["response"]["body"]["error"]);
    assert_eq!(answers[3]["error"]["message"], "line 4: method must be POST");
    assert_eq!(answers[4]["error"]["message"], "", "axum's own 404 has no body");

    let Opened::Complete(failures) = Batch::open(&files.input(), &files.output()).unwrap() else {
        panic!("unfinished")
    };
    assert_eq!(failures.count(), 4, "those of an earlier run count as well");
    assert!(report(&failures, false).is_ok());
    let error = report(&failures, true).unwrap_err().to_string();
    assert!(error.starts_with("4 requests failed: line 2, line 4 (custom_id 'get'), "), "{error}");
}

#[tokio::test]
async fn an_interrupted_batch_goes_on_where_it_ended() {
    let (asked, most) = Default::default();
    let router = echo(&asked, &most);
    let files = Files::new(&requests(60));
    let mut batch = files.batch().unwrap().unwrap();
    let interrupted = tokio::time::timeout(Duration::from_millis(40), batch.answer(router.clone(), 4)).await;
    assert!(interrupted.is_err(), "60 requests of 5 ms, 4 at a time, do not end in 40 ms");
    assert!(batch.kept().contains("out.jsonl.partial"));
    drop(batch);
    assert!(!files.output().exists());
    let before = std::fs::read_to_string(files.partial()).unwrap();
    let kept = before.lines().count();
    assert!(kept < 60);

    // A kill may also leave the start of a line.
    std::fs::write(files.partial(), format!("{before}{{\"id\":\"batch_r")).unwrap();
    asked.store(0, Ordering::SeqCst);
    files.run(&router).await;
    let after = std::fs::read_to_string(files.output()).unwrap();
    assert!(after.starts_with(&before), "what was answered is kept as it was");
    assert_eq!(asked.load(Ordering::SeqCst), 60 - kept, "and not asked again");
    let ids: Vec<_> = files.answers().iter().map(|answer| answer["custom_id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ids, (0..60).map(|id| format!("r{id}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_complete_output_is_left_alone_and_a_longer_input_continues_it() {
    let (asked, most) = Default::default();
    let router = echo(&asked, &most);
    let files = Files::new(&requests(3));
    files.run(&router).await;
    let first = std::fs::read_to_string(files.output()).unwrap();
    assert!(files.batch().unwrap().is_none());
    assert_eq!(std::fs::read_to_string(files.output()).unwrap(), first);

    std::fs::write(files.input(), requests(5).join("\n")).unwrap();
    files.run(&router).await;
    assert_eq!(asked.load(Ordering::SeqCst), 5);
    assert!(std::fs::read_to_string(files.output()).unwrap().starts_with(&first));
}

#[tokio::test]
async fn answers_to_other_requests_are_not_touched() {
    let files = Files::new(&requests(2));
    files.run(&echo(&Default::default(), &Default::default())).await;
    let first = std::fs::read_to_string(files.output()).unwrap();
    std::fs::write(files.input(), requests(3)[1..].join("\n")).unwrap();
    let error = format!("{:#}", files.batch().err().unwrap());
    assert!(error.contains("out.jsonl") && error.contains("answer 1 belongs to another request"), "{error}");
    assert_eq!(std::fs::read_to_string(files.output()).unwrap(), first);

    std::fs::write(files.partial(), "").unwrap();
    assert!(format!("{:#}", files.batch().err().unwrap()).contains("remove one of the two files"));
}

#[tokio::test]
async fn two_processes_do_not_write_one_output() {
    let files = Files::new(&requests(2));
    let first = files.batch().unwrap().unwrap();
    let error = format!("{:#}", files.batch().err().unwrap());
    assert!(error.contains("another process"), "{error}");
    drop(first);
    assert!(files.batch().unwrap().is_some());
}

#[tokio::test]
async fn a_busy_server_is_asked_again() {
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    let busy = post(move || {
        let tries = counter.fetch_add(1, Ordering::SeqCst);
        async move {
            let status = if tries < 1 { http::StatusCode::TOO_MANY_REQUESTS } else { http::StatusCode::OK };
            (status, [(http::header::RETRY_AFTER, "0")], "{\n\"a\": \"b\\n\"\n}")
        }
    });
    let files = Files::new(&requests(1));
    files.run(&Router::new().route("/v1/echo", busy)).await;
    assert_eq!(files.answers()[0]["response"]["body"], json!({"a": "b\n"}));
    assert_eq!(asked.load(Ordering::SeqCst), 2);
}
