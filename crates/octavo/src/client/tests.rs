use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use futures::{StreamExt, stream};
use http::{HeaderMap, StatusCode};
use octavo_http_client::Certificates;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::*;
use crate::client::connection::{Piece, root_of};
use crate::client::terminal::{Line, Reader};

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
        match last.as_str().or(last[1]["text"].as_str()).unwrap() {
            "bad" => (StatusCode::BAD_REQUEST, json!({"error": {"message": "too bad"}}).to_string()).into_response(),
            "hang" => {
                let word = events(&["wait"]).replace("data: [DONE]\n\n", "");
                let first = stream::iter([Ok::<_, io::Error>(word)]);
                Body::from_stream(first.chain(stream::pending())).into_response()
            }
            _ => events(&["you said ", &messages.len().to_string(), " things"]).into_response(),
        }
    };
    let info = json!({"vllm_config": {"sampling_defaults": {"temperature": 0.2}}}).to_string();
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
        .route("/server_info", get(async || info))
}

async fn listen(router: Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

fn session(router: Router, system: Option<&str>) -> Session<Vec<u8>> {
    let mut parameters = Parameters::default();
    parameters.set_parameter("max_tokens", "7").unwrap();
    Session::new(Client::local(router, "m"), parameters, system.map(str::to_owned), Screen::new(vec![], false))
}

/// Lines as they are typed; the end of the input when there are no more.
struct Script(std::sync::mpsc::Receiver<Line>);

impl Reader for Script {
    fn read(&mut self, _: &str) -> io::Result<Line> {
        Ok(self.0.recv().unwrap_or(Line::End))
    }
}

fn typed(lines: &[&str]) -> Input {
    let (send, receive) = std::sync::mpsc::channel();
    for line in lines {
        send.send(Line::Text((*line).to_owned())).unwrap();
    }
    Input::Typed(Some(Box::new(Script(receive))))
}

fn given(message: &str) -> Input {
    Input::Given(VecDeque::from([message.to_owned()]))
}

fn never() -> (mpsc::Sender<()>, Interrupts) {
    mpsc::channel(1)
}

#[tokio::test]
async fn a_conversation_is_remembered_until_it_is_cleared() {
    let asked = Asked::default();
    let (_keep, interrupts) = never();
    let lines = ["one", "two", "/clear", "/what", "", " /three", "/bye", "four"];
    session(server(&asked), Some("be brief")).chat(typed(&lines), interrupts).await.unwrap();
    let asked = asked.lock().unwrap();
    let counts: Vec<_> = asked.iter().map(|request| request["messages"].as_array().unwrap().len()).collect();
    assert_eq!(counts, [2, 4, 2]);
    assert_eq!(asked[1]["messages"][2], json!({"role": "assistant", "content": "you said 2 things"}));
    assert_eq!(asked[2]["messages"][1]["content"], " /three");
}

#[tokio::test]
async fn a_request_carries_only_what_the_user_chose() {
    let asked = Asked::default();
    let (_keep, interrupts) = never();
    let lines =
        ["one", "/set temperature 0.5", "/set", "/set top_p 2", "/system be kind", "two", "/set max_tokens default"];
    let lines = [&lines[..], &["/set temperature default", "/system \"\"", "three"]].concat();
    session(server(&asked), None).chat(typed(&lines), interrupts).await.unwrap();
    let mut asked = asked.lock().unwrap().clone();
    let messages: Vec<_> = asked.iter_mut().map(|request| request["messages"].take()).collect();
    let plain = json!({"messages": null, "model": "m", "stream": true});
    let with = |extra: Value| {
        let mut request = plain.clone();
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        request
    };
    assert_eq!(
        asked,
        [with(json!({"max_tokens": 7})), with(json!({"max_tokens": 7, "temperature": 0.5})), plain.clone()]
    );
    assert_eq!(messages[1][0], json!({"role": "system", "content": "be kind"}));
    assert_eq!(messages[2][0]["role"], "user");
}

#[tokio::test]
async fn a_saved_conversation_is_continued_and_a_file_precedes_a_message() {
    let asked = Asked::default();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (saved, notes) = (path("c.json"), path("notes.txt"));
    std::fs::write(&notes, "some notes").unwrap();
    let (_keep, interrupts) = never();
    let lines = ["one".to_owned(), "/set top_k 5".into(), format!("/save {saved}"), format!("/save {notes}")];
    let lines: Vec<_> = lines.iter().map(String::as_str).collect();
    session(server(&asked), Some("be brief")).chat(typed(&lines), interrupts).await.unwrap();
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "some notes", "other files are not overwritten");

    let (_keep, interrupts) = never();
    let lines = [format!("/load {notes}"), format!("/load {saved}"), format!("/read {notes}"), "two".to_owned()];
    let lines: Vec<_> = lines.iter().map(String::as_str).collect();
    session(server(&asked), None).chat(typed(&lines), interrupts).await.unwrap();
    let asked = asked.lock().unwrap();
    let contents: Vec<_> = asked[1]["messages"].as_array().unwrap().iter().map(|m| m["content"].clone()).collect();
    assert_eq!(contents, ["be brief", "one", "you said 2 things", "some notes\n\ntwo"]);
    assert_eq!((&asked[1]["top_k"], &asked[1]["max_tokens"]), (&json!(5), &json!(7)));
}

#[tokio::test]
async fn images_go_with_the_next_message_and_stay_in_the_conversation() {
    let asked = Asked::default();
    let folder = tempfile::tempdir().unwrap();
    let (saved, missing) = (folder.path().join("c.json"), folder.path().join("missing.png"));
    let (_keep, interrupts) = never();
    let lines =
        ["one", "/image http://host/b", "/image http://host/c", "/image \"\"", "two", "/image http://host/d", "bad"];
    let files = [format!("/image {}", missing.display()), "three".into(), format!("/save {}", saved.display())];
    let lines: Vec<_> = lines.into_iter().chain(files.iter().map(String::as_str)).collect();
    let session = || session(server(&asked), None);
    session().with_images(vec!["http://host/a".into()]).chat(typed(&lines), interrupts).await.unwrap();
    let parts = |url: &str, text: &str| json!([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]);
    let contents = |request: usize| -> Vec<Value> {
        asked.lock().unwrap()[request]["messages"].as_array().unwrap().iter().map(|m| m["content"].clone()).collect()
    };
    let expected =
        [parts("http://host/a", "one"), json!("you said 1 things"), json!("two"), json!("you said 3 things")];
    assert_eq!(contents(1), expected[..3]);
    // The image of a question that was refused goes with the next one.
    assert_eq!(contents(2)[4], parts("http://host/d", "bad"));
    assert_eq!(contents(3)[4], parts("http://host/d", "three"));

    let lines = [format!("/load {}", saved.display()), "/image http://host/e".into(), "/clear".into(), "four".into()];
    let lines: Vec<_> = lines.iter().map(String::as_str).collect();
    for lines in [&[lines[0], "four"][..], &lines] {
        let (_keep, interrupts) = never();
        session().chat(typed(lines), interrupts).await.unwrap();
    }
    assert_eq!(contents(4)[..4], expected);
    assert_eq!(contents(5), [json!("four")]);
}

#[tokio::test]
async fn an_image_without_a_message_is_an_error() {
    let (_keep, interrupts) = never();
    let session = session(server(&Asked::default()), None).with_images(vec!["http://host/a".into()]);
    let error = session.chat(given(" "), interrupts).await.unwrap_err().to_string();
    assert_eq!(error, "an image needs a message, and there is none");
}

#[tokio::test]
async fn an_error_is_told_and_its_question_forgotten() {
    let asked = Asked::default();
    let (_keep, interrupts) = never();
    session(server(&asked), None).chat(typed(&["bad", "good"]), interrupts).await.unwrap();
    assert_eq!(asked.lock().unwrap()[1]["messages"], json!([{"role": "user", "content": "good"}]));

    let (_keep, interrupts) = never();
    let error = session(server(&asked), None).chat(given("bad"), interrupts).await.unwrap_err().to_string();
    assert_eq!(error, "the server answered 400 Bad Request: too bad");
}

#[tokio::test]
async fn an_interrupt_stops_the_answer_and_not_the_program() {
    let asked = Asked::default();
    let (interrupt, interrupts) = never();
    let (send, lines) = std::sync::mpsc::channel();
    let say = |text: &str| send.send(Line::Text(text.to_owned())).unwrap();
    say("hang");
    let input = Input::Typed(Some(Box::new(Script(lines))));
    let chat = tokio::spawn(session(server(&asked), None).chat(input, interrupts));
    let requests = async |count: usize| {
        while asked.lock().unwrap().len() < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    requests(1).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    interrupt.send(()).await.unwrap();
    // At the prompt Ctrl-C discards the line.
    send.send(Line::Interrupted).unwrap();
    say("again");
    requests(2).await;
    // What there was of the answer is part of the conversation.
    assert_eq!(asked.lock().unwrap()[1]["messages"][1], json!({"role": "assistant", "content": "wait"}));
    drop(send);
    tokio::time::timeout(Duration::from_secs(10), chat).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn the_models_defaults_are_found_beside_the_api() {
    let url = listen(server(&Asked::default())).await;
    for url in [url.as_str(), root_of(&url)] {
        let info = Client::at(url, None, &Certificates::Trusted)
            .unwrap()
            .get("/server_info?config_format=json")
            .await
            .unwrap();
        let info: Value = serde_json::from_slice(&info).unwrap();
        assert_eq!(info["vllm_config"]["sampling_defaults"], json!({"temperature": 0.2}));
    }
}

#[tokio::test]
async fn a_remote_server_is_asked_for_its_first_model() {
    let asked = Asked::default();
    let url = listen(server(&asked)).await;
    let mut client = Client::connect(&url, Some("key"), &Certificates::Trusted, None).await.unwrap();
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
    let connect = async |url: &str, model| {
        let error = Client::connect(url, None, &Certificates::Trusted, model).await.err().unwrap();
        format!("{error:#}")
    };
    let error = connect(&url, None).await;
    assert_eq!(error, "the server answered 401 Unauthorized: Unauthorized; give the key with --api-key");
    let error = connect(&url.replace("/v1", "/v2"), None).await;
    assert!(error.contains("404") && error.contains("with /v1 at its end"), "{error}");
    let error = connect("http://127.0.0.1:1/v1", None).await;
    assert!(error.starts_with("http://127.0.0.1:1/v1 does not answer: connecting failed"), "{error}");
    let error = connect("ftp://127.0.0.1:1/v1", Some("m")).await;
    assert!(error.contains("must start with http:// or https://"), "{error}");
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
    session(server(&asked), None).complete(typed(&["Once", "", "Twice"]), interrupts).await.unwrap();
    let prompts: Vec<_> = asked.lock().unwrap().iter().map(|request| request["prompt"].clone()).collect();
    assert_eq!(prompts, ["Once", "Twice"]);
}
