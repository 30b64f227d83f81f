//! Conversations with images: the answers are PyTorch's, and images that cannot be used are refused.

use std::path::{Path, PathBuf};

use octavo_tests::Server;
use serde_json::{Value, json};

use crate::OCTAVO;

/// A model of random weights.
fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata").join(name)
}

fn tiny() -> PathBuf {
    model("qwen3-vl")
}

fn server(args: &[&str]) -> Server {
    server_of(&tiny(), args)
}

fn server_of(model: &Path, args: &[&str]) -> Server {
    Server::start(Path::new(OCTAVO), model, &[&["--device", "cpu", "--cpu-threads", "1"], args].concat())
}

/// The requests whose answers PyTorch has computed.
fn cases() -> Vec<Value> {
    cases_of(&tiny())
}

fn cases_of(model: &Path) -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(model.join("chat.json")).unwrap()).unwrap()
}

fn chat(messages: &Value) -> Value {
    json!({"messages": messages, "max_tokens": 8, "temperature": 0, "return_token_ids": true})
}

fn one_image(part: Value) -> Value {
    chat(&json!([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]))
}

fn url(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}})
}

/// The URL of the image of the first case.
fn picture() -> String {
    cases()[0]["messages"][0]["content"][1]["image_url"]["url"].as_str().unwrap().to_owned()
}

fn decoded(url: &str) -> Vec<u8> {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.decode(url.split_once(',').unwrap().1).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_those_of_pytorch() {
    // In the second run, chunks of the prompt begin and end inside images.
    for args in [&[][..], &["--max-num-batched-tokens", "10"]] {
        let server = server(args);
        for case in cases() {
            let mut request = chat(&case["messages"]);
            let (status, answer) = server.post("/v1/chat/completions", &request).await;
            assert_eq!(status, 200, "{answer}");
            assert_eq!(answer["choices"][0]["token_ids"], case["answer"], "{} {args:?}", case["name"]);
            assert_eq!(answer["usage"]["prompt_tokens"], case["prompt_tokens"], "{}", case["name"]);
            // As good as greedy, which allows one sequence only.
            (request["n"], request["temperature"]) = (json!(2), json!(0.01));
            let (_, several) = server.post("/v1/chat/completions", &request).await;
            for choice in several["choices"].as_array().unwrap() {
                assert_eq!(choice["token_ids"], case["answer"], "{} again", case["name"]);
            }
            let (_, tokens) = server.post("/tokenize", &json!({"messages": case["messages"]})).await;
            assert_eq!(tokens["count"], case["prompt_tokens"], "{}", case["name"]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_about_images_in_tiles_are_those_of_pytorch() {
    let model = model("idefics3");
    let cases = cases_of(&model);
    for cases in cases.chunk_by(|a, b| a["settings"] == b["settings"]) {
        let settings = cases[0]["settings"].to_string();
        // In the second run, a step has room for one or two tiles.
        for args in [&[][..], &["--max-num-batched-tokens", "10"]] {
            let server = server_of(&model, &[&["--mm-processor-kwargs", &settings], args].concat());
            for case in cases {
                // The second answer takes the blocks of the first one's prompt.
                for _ in 0..2 {
                    let (status, answer) = server.post("/v1/chat/completions", &chat(&case["messages"])).await;
                    assert_eq!(status, 200, "{answer}");
                    assert_eq!(answer["choices"][0]["token_ids"], case["answer"], "{} {args:?}", case["name"]);
                    assert_eq!(answer["usage"]["prompt_tokens"], case["prompt_tokens"], "{}", case["name"]);
                }
                let (_, tokens) = server.post("/tokenize", &json!({"messages": case["messages"]})).await;
                assert_eq!(tokens["count"], case["prompt_tokens"], "{}", case["name"]);
            }
        }
    }
}

/// The tokens of an image see each other, so that no step cuts one.
#[tokio::test(flavor = "multi_thread")]
async fn answers_about_images_that_are_seen_whole_are_those_of_pytorch() {
    let model = model("gemma3-images");
    for args in [&[][..], &["--max-num-batched-tokens", "17", "--max-num-seqs", "2"]] {
        let server = server_of(&model, args);
        for case in cases_of(&model) {
            // The second answer takes the blocks of the first one's prompt.
            for _ in 0..2 {
                let (status, answer) = server.post("/v1/chat/completions", &chat(&case["messages"])).await;
                assert_eq!(status, 200, "{answer}");
                assert_eq!(answer["choices"][0]["token_ids"], case["answer"], "{} {args:?}", case["name"]);
                assert_eq!(answer["usage"]["prompt_tokens"], case["prompt_tokens"], "{}", case["name"]);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_must_have_room_for_an_image_that_is_seen_whole() {
    let model = model("gemma3-images");
    let start = |args: &[&str]| {
        let mut command = std::process::Command::new(OCTAVO);
        command.arg("serve").arg(&model).args(["--device", "cpu", "--max-num-batched-tokens", "20"]).args(args);
        command
    };
    let output = start(&[]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    let last = error.lines().last().unwrap_or_default();
    assert!(last.contains("--max-num-batched-tokens 20: this model computes the 16 tokens of an image"), "{error}");
    assert!(last.contains("give at least 271"), "{error}");
    let server = server_of(&model, &["--max-num-batched-tokens", "20", "--max-num-seqs", "5"]);
    let case = &cases_of(&model)[0];
    let mut body = chat(&case["messages"]);
    body["prompt_logprobs"] = json!(1);
    let (status, answer) = server.post("/v1/chat/completions", &body).await;
    assert_eq!(status, 400, "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("the log-probabilities of a prompt with images"), "{message}");
    let _texts = server_of(&model, &["--max-num-batched-tokens", "20", "--language-model-only"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_cannot_take_the_place_of_tiles() {
    let model = model("idefics3");
    let case = &cases_of(&model)[0];
    let server = server_of(&model, &["--max-model-len", "50"]);
    let refused = async |content: Value| {
        let body = chat(&json!([{"role": "user", "content": content}]));
        let (status, answer) = server.post("/v1/chat/completions", &body).await;
        assert_eq!(status, 400, "{answer}");
        answer["error"]["message"].as_str().unwrap().to_owned()
    };
    let mut parts = case["messages"][0]["content"].clone();
    // 28 tokens of tiles fit, but their tags and texts do not.
    let message = refused(parts.clone()).await;
    assert!(message.starts_with("This model's maximum context length is 50 tokens."), "{message}");
    parts[0]["text"] = json!("<image>");
    let message = refused(parts).await;
    assert!(
        message.starts_with("The prompt has 2 placeholders for images, but the messages have 1 images."),
        "{message}"
    );
    let message = refused(json!("<image>")).await;
    assert!(
        message.starts_with("The prompt has 1 placeholders for images, but the messages have 0 images."),
        "{message}"
    );
    let (status, answer) = server.post("/v1/chat/completions", &chat(&json!([{"role": "user", "content": "a"}]))).await;
    assert_eq!(status, 200, "{answer}");
}

/// The first case in the forms of the other routes.
#[tokio::test(flavor = "multi_thread")]
async fn every_route_of_conversations_takes_images() {
    let (server, case) = (server(&[]), &cases()[0]);
    let (_, expected) = server.post("/v1/chat/completions", &chat(&case["messages"])).await;
    let text = &expected["choices"][0]["message"]["content"];
    let data = picture().split_once(',').unwrap().1.to_owned();
    let parts = |kind: &str, image: Value| {
        json!([{"role": "user", "content": [
            {"type": kind, "text": "What is this?"}, image, {"type": kind, "text": "Say it."}]}])
    };
    let input = parts("input_text", json!({"type": "input_image", "image_url": picture()}));
    let request = json!({"input": input, "max_output_tokens": 8, "temperature": 0});
    let (_, response) = server.post("/v1/responses", &request).await;
    assert_eq!(response["output"][0]["content"][0]["text"], *text, "{response}");
    assert_eq!(response["usage"]["input_tokens"], case["prompt_tokens"]);

    let source = json!({"type": "base64", "media_type": "image/png", "data": data});
    let messages = parts("text", json!({"type": "image", "source": source}));
    let request = json!({"model": "default", "messages": messages, "max_tokens": 8, "temperature": 0});
    let (_, message) = server.post("/v1/messages", &request).await;
    assert_eq!(message["content"][0]["text"], *text, "{message}");
    // The rest of the prompt is in the prefix cache by now.
    let usage = ["input_tokens", "cache_read_input_tokens"].map(|key| message["usage"][key].as_u64().unwrap());
    assert_eq!(json!(usage[0] + usage[1]), case["prompt_tokens"]);
    let (_, counted) = server.post("/v1/messages/count_tokens", &request).await;
    assert_eq!(counted["input_tokens"], case["prompt_tokens"]);

    let both = json!({"messages": [case["messages"], cases()[1]["messages"]], "max_tokens": 8, "temperature": 0,
        "return_token_ids": true});
    let (_, batch) = server.post("/v1/chat/completions/batch", &both).await;
    for (index, case) in cases()[..2].iter().enumerate() {
        assert_eq!(batch["choices"][index]["token_ids"], case["answer"], "{batch}");
    }
}

/// A GIF image of a few bytes that claims to be as large as the format allows.
fn huge_gif() -> String {
    use base64::Engine;
    let file = [b"GIF89a".as_slice(), &[0xff; 4], &[0; 3], b",\0\0\0\0", &[0xff; 4], &[0, 8, 1, 0, 0], b";"].concat();
    format!("data:image/gif;base64,{}", base64::engine::general_purpose::STANDARD.encode(file))
}

#[tokio::test(flavor = "multi_thread")]
async fn images_that_cannot_be_used_are_refused_by_name() {
    let server = server(&["--limit-mm-per-prompt", r#"{"image": 1}"#]);
    let refused = async |body: Value| {
        let (status, answer) = server.post("/v1/chat/completions", &body).await;
        let error = &answer["error"];
        (status, error["message"].as_str().unwrap_or_default().to_owned(), error["param"].clone())
    };
    let many = "At most 1 image(s) may be provided in one prompt. Set `--limit-mm-per-prompt` to increase this limit.";
    assert_eq!(refused(chat(&cases()[1]["messages"])).await, (400, many.into(), json!("image")));
    let huge = "Image dimensions 65535x65535 (4294836225 pixels) exceed the maximum of 178956970 pixels. \
                Set VLLM_MAX_IMAGE_PIXELS to increase this limit.";
    for (part, status, message) in [
        (url("data:image/png;base64,AAAA"), 400, "Failed to load image: cannot identify image file"),
        (url(&huge_gif()), 400, huge),
        (url("data:image/png;base64"), 400, "Invalid data URL 'data:image/png;base64': missing ',' separator."),
        (url("data:image/png,x"), 400, "Only base64 data URLs are supported for now."),
        (url("file:///etc/passwd"), 400, "Cannot load local files without `--allowed-local-media-path`."),
        (url("ftp://host/x.png"), 400, "The URL must be either a HTTP, data or file URL."),
        (
            url("http://127.0.0.1:1/x.png"),
            422,
            "Failed to fetch media from URL: the host 127.0.0.1 has an address that is not public",
        ),
        (
            json!({"type": "image_url", "image_url": null, "uuid": "unseen"}),
            400,
            "No image with the uuid 'unseen' is cached; the request must contain the image.",
        ),
    ] {
        assert_eq!(refused(one_image(part)).await, (status, message.into(), json!("image_url")));
    }
    let video = one_image(json!({"type": "video_url", "video_url": {"url": "https://host/x.mp4"}}));
    assert_eq!(refused(video).await.1, "At most 0 video(s) may be provided in one prompt.");
    // A client cannot write the token of an image.
    let typed = chat(&json!([{"role": "user", "content": "<|image_pad|>"}]));
    let (status, message, param) = refused(typed).await;
    assert_eq!((status, param), (400, json!("messages")));
    assert!(
        message.starts_with("The prompt has 1 placeholders for images, but the messages have 0 images."),
        "{message}"
    );
    // A request that is refused for another reason loads no image.
    let unreachable = "http://127.0.0.1:1/x.png";
    for (route, field, part) in [
        ("/v1/chat/completions", "messages", url(unreachable)),
        ("/v1/responses", "input", json!({"type": "input_image", "image_url": unreachable})),
        ("/v1/messages", "messages", json!({"type": "image", "source": {"type": "url", "url": unreachable}})),
    ] {
        let messages = json!([{"role": "user", "content": [part]}]);
        let (status, answer) = server.post(route, &json!({"model": "other", "max_tokens": 1, field: messages})).await;
        assert_eq!(status, 404, "{route}: {answer}");
    }
    let mut truncated = chat(&cases()[0]["messages"]);
    truncated["truncate_prompt_tokens"] = json!(10);
    assert_eq!(refused(truncated).await.2, json!("truncate_prompt_tokens"));
    let (status, answer) = server.post("/v1/chat/completions", &chat(&cases()[0]["messages"])).await;
    assert_eq!(status, 200, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn images_longer_than_the_context_are_refused() {
    let server = server(&["--max-model-len", "80"]);
    let (status, answer) = server.post("/v1/chat/completions", &chat(&cases()[1]["messages"])).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.starts_with("This model's maximum context length is 80 tokens."), "{message}");
    let smaller = r#"{"size": {"shortest_edge": 256, "longest_edge": 1024}}"#;
    let server = self::server(&["--max-model-len", "80", "--mm-processor-kwargs", smaller]);
    let (status, answer) = server.post("/v1/chat/completions", &chat(&cases()[1]["messages"])).await;
    assert_eq!(status, 200, "smaller images fit: {answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_the_encoder_refuses_images() {
    let server = server(&["--language-model-only"]);
    let (status, answer) = server.post("/v1/chat/completions", &chat(&cases()[0]["messages"])).await;
    assert_eq!(
        (status, &answer["error"]["message"]),
        (400, &json!("At most 0 image(s) may be provided in one prompt."))
    );
    let (status, _) = server.post("/v1/chat/completions", &chat(&json!([{"role": "user", "content": "a"}]))).await;
    assert_eq!(status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn images_come_from_a_folder_or_by_a_name_given_before() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a b.png");
    std::fs::write(&file, decoded(&picture())).unwrap();
    let server = server(&["--allowed-local-media-path", folder.path().to_str().unwrap()]);
    let answer = async |part: Value| {
        let (status, answer) = server.post("/v1/chat/completions", &one_image(part)).await;
        (status, answer["choices"][0]["token_ids"].clone())
    };
    let expected = answer(url(&picture())).await;
    assert_eq!(expected.0, 200);
    let local = format!("file://{}", file.to_str().unwrap().replace(' ', "%20"));
    let mut named = url(&local);
    named["uuid"] = json!("logo");
    assert_eq!(answer(named).await, expected);
    assert_eq!(answer(json!({"type": "image_url", "image_url": null, "uuid": "logo"})).await, expected);
    assert_eq!(answer(url("file:///etc/passwd")).await.0, 400);
}

/// The answer of `octavo` with these arguments, or what it says on failure.
fn octavo(args: &[&str]) -> Result<String, String> {
    let folder = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(OCTAVO);
    command.args(args).args(["--temperature", "0", "--max-tokens", "8"]).env("HOME", folder.path());
    let output = command.stdin(std::process::Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap().trim_end_matches('\n').to_owned();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_terminal_sends_images() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    // The name says nothing about the content.
    std::fs::write(path("image.gif"), decoded(&picture())).unwrap();
    std::fs::write(path("notes.png"), "notes").unwrap();
    let server = server(&["--served-model-name", "eyes"]);
    let address = server.url("");
    let image = || url(&picture());
    let text = json!({"type": "text", "text": "What is this?"});
    let expected = async |content: Value| {
        let (status, answer) =
            server.post("/v1/chat/completions", &chat(&json!([{"role": "user", "content": content}]))).await;
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["message"]["content"].as_str().unwrap().trim_end_matches('\n').to_owned()
    };
    let ask = |images: &[&str]| {
        let images = images.iter().flat_map(|image| ["--image", image]);
        octavo(&["chat", "--url", &address, "--quick", "What is this?"].into_iter().chain(images).collect::<Vec<_>>())
    };
    let (file, data) = (path("image.gif"), picture());
    let one = expected(json!([image(), text])).await;
    assert_eq!(ask(&[&file]).unwrap(), one);
    assert_eq!(ask(&[&data]).unwrap(), one);
    assert_eq!(ask(&[&file, &data]).unwrap(), expected(json!([image(), image(), text])).await);
    assert_ne!(one, expected(json!([text])).await, "the image makes a difference");
    let model = tiny();
    let run =
        ["run", model.to_str().unwrap(), "--device", "cpu", "--cpu-threads", "1", "--image", &file, "What is this?"];
    assert_eq!(octavo(&run).unwrap(), one);

    let notes = path("notes.png");
    let refused = format!("octavo: {notes} is not a PNG, JPEG, WebP or GIF image: ");
    let said = ask(&[&notes]).unwrap_err();
    assert!(said.starts_with(&refused), "{said}");
    let missing = path("missing.png");
    let said = ask(&[&missing]).unwrap_err();
    assert!(said.starts_with(&format!("octavo: {missing}: No such file or directory")), "{said}");
    let (_, info) = server.get("/server_info?config_format=json").await;
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["vllm_config"]["limit_mm_per_prompt"], json!({"image": 999}));
}

/// Answers `/picture.png` with a file, announces large files at paths that begin with `/large`, and is silent at others.
async fn slow_server(picture: Vec<u8>) -> (String, tokio::task::JoinHandle<()>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let picture = picture.clone();
            connections.spawn(async move {
                let mut head = vec![];
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await?);
                }
                let announce =
                    |bytes: usize| format!("HTTP/1.1 200 OK\r\nContent-Length: {bytes}\r\n\r\n").into_bytes();
                if head.starts_with(b"GET /picture.png ") {
                    return stream.write_all(&[announce(picture.len()), picture].concat()).await;
                }
                if head.starts_with(b"GET /large") {
                    stream.write_all(&announce(256 << 20)).await?;
                }
                std::future::pending().await
            });
        }
    });
    (format!("http://{address}"), task)
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_servers_of_images_delay_nobody_else() {
    let args = ["--device", "cpu", "--cpu-threads", "1", "--allowed-media-networks", "127.0.0.0/8"];
    let variables = [("VLLM_IMAGE_FETCH_TIMEOUT", Path::new("600"))];
    let server = Server::start_in(Path::new(OCTAVO), &tiny(), &args, &variables);
    let (slow, _task) = slow_server(decoded(&picture())).await;
    // More than any lane has places.
    let waiting: Vec<_> = (0..200)
        .map(|number| {
            let path = if number % 2 == 0 { "large" } else { "silent" };
            let body = one_image(url(&format!("{slow}/{path}/{number}.png")));
            let request = server.client().post(server.url("/v1/chat/completions")).json(&body);
            tokio::spawn(request.send())
        })
        .collect();
    let text = chat(&json!([{"role": "user", "content": "a"}]));
    for body in [&text, &one_image(url(&picture())), &one_image(url(&format!("{slow}/picture.png")))] {
        for _ in 0..20 {
            let (status, answer) = server.post("/v1/chat/completions", body).await;
            assert_eq!(status, 200, "{answer}");
        }
    }
    assert!(waiting.iter().all(|request| !request.is_finished()));
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    server.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_given_with_one_key_means_nothing_with_another() {
    let server = server(&["--api-key", "alice", "bob", "--share-prefix-cache"]);
    let status = async |key: &str, part: Value| {
        let request = server.client().post(server.url("/v1/chat/completions")).bearer_auth(key);
        request.json(&one_image(part)).send().await.unwrap().status().as_u16()
    };
    let name = || json!({"type": "image_url", "image_url": null, "uuid": "logo"});
    let mut named = url(&picture());
    named["uuid"] = json!("logo");
    assert_eq!(status("alice", named).await, 200);
    assert_eq!([status("alice", name()).await, status("bob", name()).await], [200, 400]);
}

#[test]
fn wrong_settings_of_the_image_processor_name_the_flag() {
    for (settings, words) in [
        (r#"{"do_sharpen": true}"#, "the setting 'do_sharpen': true of the image processor is not supported"),
        (
            r#"{"images_kwargs": {"max_image_size": {"longest_edge": 48}}}"#,
            "'max_image_size' of the image processor is 48",
        ),
        (r#"{"size": {"longest_edge": 9999}}"#, "size of the image processor has a longest side of 9999"),
        (r#"{"size": {"longest_edge": 1000}}"#, "more than 32 tiles of 26 pixels"),
    ] {
        let mut command = std::process::Command::new(OCTAVO);
        command.arg("serve").arg(model("idefics3")).args(["--device", "cpu", "--mm-processor-kwargs", settings]);
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{error}");
        let last = error.lines().last().unwrap_or_default();
        assert!(last.contains("--mm-processor-kwargs: ") && last.contains(words), "{error}");
        assert!(!last.contains("preprocessor_config.json"), "{error}");
    }
    // The settings do not matter to a server of texts.
    let _server = server_of(&model("idefics3"), &["--mm-processor-kwargs", r#"{"a": 1}"#, "--language-model-only"]);
}
