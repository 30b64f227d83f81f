use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use futures::{StreamExt, stream};
use http::{HeaderMap, StatusCode};
use tokio::sync::mpsc;

use super::*;

/// What the stand-in server was asked.
type Asked = Arc<Mutex<Vec<Value>>>;

fn events(texts: &[&str]) -> String {
    let event = |text: &&str| format!("data: {}\n\n", json!({"choices": [{"delta": {"content": text}, "text": text}]}));
    texts.iter().map(event).chain(["data: [DONE]\n\n".into()]).collect()
}

/// Answers every message with `you said N things`; hangs after a word if the last one is `hang`, refuses `bad`.
fn server(asked: &Asked) -> Router {
    let record = Arc::clone(asked);
    let answer = move |body: Bytes| async move {
        let request: Value = serde_json::from_slice(&body).unwrap();
        let messages = request["messages"].as_array().cloned().unwrap_or_default();
        let last = messages.last().map(|message| message["content"].clone()).unwrap_or(request["prompt"].clone());
        record.lock().unwrap().push(request);
        match last.as_str().unwrap() {
            "bad" => (StatusCode::BAD_REQUEST, json!({"error": {"message": "too bad"}}).to_string()).into_response(),
            "hang" => {
                let word = events(&["wait"]).replace("data: [DONE]\n\n", "");
                let first = stream::iter([Ok::<_, io::Error>(word)]);
                Body::from_stream(first.chain(stream::pending())).into_response()
            }
            _ => events(&["you said ", &messages.len().to_string(), " things"]).into_response(),
        }
    };
    let models = |headers: HeaderMap| async move {
        match headers.get("authorization").is_some_and(|key| key == "Bearer key") {
            true => json!({"data": [{"id": "first"}, {"id": "second"}]}).to_string().into_response(),
            false => (StatusCode::UNAUTHORIZED, r#"{"error":"Unauthorized"}"#).into_response(),
        }
    };
    let answer = post(answer);
    Router::new()
        .route("/v1/chat/completions", answer.clone())
        .route("/v1/completions", answer)
        .route("/v1/models", get(models))
}

async fn listen(router: Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

fn session(router: Router) -> Session<Vec<u8>> {
    Session { client: Client::local(router, "m"), max_tokens: Some(7), screen: Screen::new(vec![], false) }
}

fn typed(lines: &[&str]) -> Input {
    let (send, receive) = mpsc::channel(lines.len());
    for line in lines {
        send.try_send(Ok((*line).to_owned())).unwrap();
    }
    Input::Typed(Some(receive))
}

fn never() -> (mpsc::Sender<()>, Interrupts) {
    mpsc::channel(1)
}

#[tokio::test]
async fn a_conversation_is_remembered_until_it_is_reset() {
    let asked = Asked::default();
    let (_keep, interrupts) = never();
    let lines = ["one", "two", "/reset", "/what", "", "three", "/exit", "four"];
    let system = vec![json!({"role": "system", "content": "be brief"})];
    session(server(&asked)).chat(system, typed(&lines), interrupts).await.unwrap();
    let asked = asked.lock().unwrap();
    let counts: Vec<_> = asked.iter().map(|request| request["messages"].as_array().unwrap().len()).collect();
    assert_eq!(counts, [2, 4, 2]);
    assert_eq!(asked[1]["messages"][2], json!({"role": "assistant", "content": "you said 2 things"}));
    assert_eq!(asked[2]["messages"][1]["content"], "three");
    assert_eq!((&asked[0]["model"], &asked[0]["stream"]), (&json!("m"), &json!(true)));
    assert_eq!(asked[0]["max_tokens"], 7);
}

#[tokio::test]
async fn an_error_is_told_and_its_question_forgotten() {
    let asked = Asked::default();
    let (_keep, interrupts) = never();
    session(server(&asked)).chat(vec![], typed(&["bad", "good"]), interrupts).await.unwrap();
    assert_eq!(asked.lock().unwrap()[1]["messages"], json!([{"role": "user", "content": "good"}]));

    let (_keep, interrupts) = never();
    let quick = Input::new(Some("bad".into()));
    let error = session(server(&asked)).chat(vec![], quick, interrupts).await.unwrap_err().to_string();
    assert_eq!(error, "the server answered 400 Bad Request: too bad");
}

#[tokio::test]
async fn an_interrupt_stops_the_answer_and_a_second_one_ends() {
    let asked = Asked::default();
    let (interrupt, interrupts) = never();
    let (send, lines) = mpsc::channel(4);
    send.try_send(Ok("hang".to_owned())).unwrap();
    let chat = session(server(&asked)).chat(vec![], Input::Typed(Some(lines)), interrupts);
    let chat = tokio::spawn(chat);
    while asked.lock().unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    interrupt.send(()).await.unwrap();
    send.send(Ok("again".to_owned())).await.unwrap();
    while asked.lock().unwrap().len() < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // What there was of the answer is part of the conversation.
    assert_eq!(asked.lock().unwrap()[1]["messages"][1], json!({"role": "assistant", "content": "wait"}));
    tokio::time::sleep(Duration::from_millis(50)).await;
    interrupt.send(()).await.unwrap();
    tokio::time::timeout(Duration::from_secs(10), chat).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_remote_server_is_asked_for_its_first_model() {
    let asked = Asked::default();
    let url = listen(server(&asked)).await;
    let mut client = Client::connect(&url, Some("key"), None).await.unwrap();
    assert_eq!(client.model(), "first");
    let mut text = String::new();
    let request = json!({"prompt": "x"});
    for _ in 0..2 {
        let take = |piece: Piece<'_>| {
            text.push_str(&format!("{piece:?}"));
            true
        };
        client.stream("/completions", &request, take).await.unwrap();
    }
    assert_eq!(text, r#"Content("you said ")Content("0")Content(" things")"#.repeat(2));
}

#[tokio::test]
async fn what_goes_wrong_is_a_sentence() {
    let url = listen(server(&Asked::default())).await;
    let connect = async |url: &str, model| format!("{:#}", Client::connect(url, None, model).await.err().unwrap());
    let error = connect(&url, None).await;
    assert_eq!(error, "the server answered 401 Unauthorized: Unauthorized; give the key with --api-key");
    let error = connect(&url.replace("/v1", "/v2"), None).await;
    assert!(error.contains("404") && error.contains("with /v1 at its end"), "{error}");
    let error = connect("http://127.0.0.1:1/v1", None).await;
    assert!(error.starts_with("http://127.0.0.1:1/v1 does not answer: connecting failed"), "{error}");
    let error = connect("https://127.0.0.1:1/v1", Some("m")).await;
    assert!(error.contains("must start with http://"), "{error}");
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_an_error() {
    let cut = post(async || "data: {\"choices\":[{\"text\":\"a\"}]}\n\n");
    let failed = post(async || "data: {\"error\":{\"message\":\"no memory\"}}\n\ndata: [DONE]\n\n");
    let router = Router::new().route("/v1/cut", cut).route("/v1/failed", failed);
    let mut client = Client::local(router, "m");
    let error = client.stream("/cut", &json!({}), |_| true).await.unwrap_err().to_string();
    assert!(error.starts_with("the answer broke off"), "{error}");
    let error = client.stream("/failed", &json!({}), |_| true).await.unwrap_err().to_string();
    assert_eq!(error, "the server gave up: no memory");
}

#[tokio::test]
async fn a_completion_is_each_line_continued() {
    let asked = Asked::default();
    let (_keep, interrupts) = never();
    session(server(&asked)).complete(typed(&["Once", "", "Twice"]), interrupts).await.unwrap();
    let prompts: Vec<_> = asked.lock().unwrap().iter().map(|request| request["prompt"].clone()).collect();
    assert_eq!(prompts, ["Once", "Twice"]);
}
