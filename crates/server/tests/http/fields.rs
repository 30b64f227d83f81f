//! Fields of vLLM beside OpenAI's.

use octavo_server::TemplateHelper;
use serde_json::{Value, json};

use crate::support::{IM_END, Setup, events, id, joined, ok};

const LN_2: f64 = std::f64::consts::LN_2;

#[tokio::test]
async fn a_prompts_logprobs_have_one_entry_a_token() {
    let server = Setup::default().start().await;
    let body = ok(server.completion(json!({"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 1}))).await;
    let logprobs = body["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), 3);
    assert_eq!(logprobs[0], Value::Null);
    for (entry, token) in logprobs[1..].iter().zip(["b", "c"]) {
        let own = &entry[(token.as_bytes()[0]).to_string()];
        assert_eq!(own["decoded_token"], token);
        let rank = own["rank"].as_f64().unwrap();
        assert!((own["logprob"].as_f64().unwrap() + rank * LN_2).abs() < 1e-3, "{entry}");
        assert!(entry.as_object().unwrap().len() <= 2, "the token's own and the most likely one: {entry}");
    }
    let chat = ok(server.chat(json!({"prompt_logprobs": 0}))).await;
    assert_eq!(chat["prompt_logprobs"].as_array().unwrap().len(), 21);
    let streamed = server.chat(json!({"prompt_logprobs": 1, "stream": true})).send().await.unwrap();
    assert_eq!(streamed.status(), 400);
    server.idle().await;
}

#[tokio::test]
async fn an_echo_comes_with_the_prompts_logprobs() {
    let server = Setup::default().start().await;
    for stream in [false, true] {
        for max_tokens in [0, 2] {
            let rest = json!({"prompt": "ab", "echo": true, "logprobs": 1, "max_tokens": max_tokens, "stream": stream});
            let choices: Vec<Value> = match stream {
                false => vec![ok(server.completion(rest)).await["choices"][0].clone()],
                true => events(server.completion(rest)).await.iter().map(|event| event["choices"][0].clone()).collect(),
            };
            let list = |key: &str| -> Vec<Value> {
                choices.iter().flat_map(|choice| choice["logprobs"][key].as_array().unwrap().clone()).collect()
            };
            let text: String = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
            let (tokens, offsets) = match max_tokens {
                0 => (json!(["a", "b"]), json!([0, 1])),
                _ => (json!(["a", "b", "Hello", " world"]), json!([0, 1, 2, 7])),
            };
            assert_eq!(text, ["ab", "", "abHello world"][max_tokens]);
            assert_eq!((Value::from(list("tokens")), Value::from(list("text_offset"))), (tokens, offsets));
            assert_eq!(list("token_logprobs")[0], Value::Null);
            assert_eq!(list("top_logprobs")[0], Value::Null);
            assert!(list("token_logprobs")[1..].iter().all(Value::is_number));
        }
    }
    server.idle().await;
}

#[tokio::test]
async fn token_ids_are_returned_on_demand() {
    let server = Setup::default().start().await;
    let drawn = [id("Hello"), id(" world"), id("!"), IM_END];
    let chat = ok(server.chat(json!({"return_token_ids": true}))).await;
    assert_eq!(chat["choices"][0]["token_ids"], json!(drawn));
    assert_eq!(chat["prompt_token_ids"].as_array().unwrap().len(), 21);
    let completion = ok(server.completion(json!({"prompt": "ab", "return_token_ids": true}))).await;
    assert_eq!(completion["choices"][0]["prompt_token_ids"], json!([97, 98]));
    assert_eq!(completion["choices"][0]["token_ids"], json!(drawn));
    let streamed = events(server.chat(json!({"return_token_ids": true, "stream": true}))).await;
    assert_eq!(streamed[0]["prompt_token_ids"].as_array().unwrap().len(), 21);
    let ids: Vec<Value> =
        streamed[1..].iter().flat_map(|e| e["choices"][0]["token_ids"].as_array().unwrap().clone()).collect();
    assert_eq!(ids, drawn);
    assert_eq!(ok(server.chat(json!({}))).await["choices"][0]["token_ids"], Value::Null);
}

#[tokio::test]
async fn tokens_may_be_spelled_as_ids() {
    let server = Setup::default().start().await;
    let rest = json!({"logprobs": true, "top_logprobs": 1, "return_tokens_as_token_ids": true, "max_tokens": 1});
    let body = ok(server.chat(rest)).await;
    let entry = &body["choices"][0]["logprobs"]["content"][0];
    let spelled = format!("token_id:{}", id("Hello"));
    assert_eq!((&entry["token"], &entry["top_logprobs"][0]["token"]), (&json!(spelled), &json!(spelled)));
}

#[tokio::test]
async fn chosen_tokens_may_be_scored() {
    let server = Setup::default().start().await;
    let (hello, two) = (id("Hello"), id(" two"));
    let rest = json!({"logprobs": 0, "logprob_token_ids": [two, hello], "max_tokens": 1});
    let body = ok(server.completion(rest)).await;
    let top = body["choices"][0]["logprobs"]["top_logprobs"][0].as_object().unwrap();
    assert_eq!(top.keys().collect::<Vec<_>>(), ["Hello", " two"]);
    let three = id(" three");
    let rest = json!({"logprobs": true, "logprob_token_ids": [two, three], "max_tokens": 1});
    let body = ok(server.chat(rest)).await;
    let top = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"].as_array().unwrap();
    let tokens: Vec<_> = top.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(tokens, ["Hello", " two", " three"], "the token itself displaces none");
    let many = vec![0; 129];
    let refused = server.completion(json!({"logprobs": 0, "logprob_token_ids": many})).send().await.unwrap();
    assert_eq!(refused.status(), 400);
}

#[tokio::test]
async fn a_prompt_may_be_cut() {
    let server = Setup::default().start().await;
    let ids = |rest: Value| {
        let body = json!({"prompt": "abcdef", "return_token_ids": true, "max_tokens": 1});
        server.completion(crate::support::with(body, rest))
    };
    let prompt = |body: Value| body["choices"][0]["prompt_token_ids"].clone();
    assert_eq!(prompt(ok(ids(json!({"truncate_prompt_tokens": 2}))).await), json!([101, 102]));
    let right = json!({"truncate_prompt_tokens": 2, "truncation_side": "right"});
    assert_eq!(prompt(ok(ids(right)).await), json!([97, 98]));
    let long = json!({"prompt": "x".repeat(10_000), "truncate_prompt_tokens": -1});
    assert_eq!(ok(ids(long)).await["usage"]["prompt_tokens"], 4095);
    let refused = ids(json!({"truncate_prompt_tokens": 5000})).send().await.unwrap();
    let message = refused.text().await.unwrap();
    assert!(message.contains("greater than max_model_len (4096)"), "{message}");
}

#[tokio::test]
async fn only_allowed_tokens_are_drawn() {
    let server = Setup::default().start().await;
    let allowed = [id(" one"), id(" two")];
    let rest = json!({"allowed_token_ids": allowed, "max_tokens": 5, "return_token_ids": true});
    let ids = ok(server.chat(rest)).await["choices"][0]["token_ids"].clone();
    assert_eq!(ids.as_array().unwrap().len(), 5);
    assert!(ids.as_array().unwrap().iter().all(|id| json!(allowed).as_array().unwrap().contains(id)), "{ids}");
    let unknown = server.chat(json!({"allowed_token_ids": [1_000_000]})).send().await.unwrap();
    assert_eq!(unknown.status(), 400);
}

#[tokio::test]
async fn bad_words_do_not_appear() {
    let server = Setup::writing("a cat and a cat").start().await;
    assert_eq!(ok(server.chat(json!({}))).await["choices"][0]["message"]["content"], "a cat and a cat");
    let body = ok(server.chat(json!({"bad_words": ["cat"], "max_tokens": 15}))).await;
    let content = body["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(content.starts_with("a ca") && !content.contains("cat"), "{content}");
}

#[tokio::test]
async fn chunks_have_as_many_tokens_as_asked_for() {
    let server = Setup::saying(&[" one", " two", " three"]).start().await;
    let rest = json!({"stream": true, "stream_interval": 3, "max_tokens": 8, "return_token_ids": true});
    let events = events(server.chat(rest)).await;
    let sizes: Vec<usize> =
        events[1..].iter().map(|event| event["choices"][0]["token_ids"].as_array().unwrap().len()).collect();
    assert_eq!(sizes, [1, 3, 3, 1]);
    assert_eq!(joined(&events, 0), " one two three one two three one two");
}

#[tokio::test]
async fn the_last_message_may_be_echoed() {
    let server = Setup::default().start().await;
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]);
    let end = json!({"continue_final_message": true, "add_generation_prompt": false});
    let rest = crate::support::with(json!({"messages": messages, "echo": true}), end);
    let request = |stream: bool| server.chat(crate::support::with(rest.clone(), json!({"stream": stream})));
    assert_eq!(ok(request(false)).await["choices"][0]["message"]["content"], "Well, Hello world!");
    assert_eq!(joined(&events(request(true)).await, 0), "Well, Hello world!");
}

#[tokio::test]
async fn cached_tokens_are_told_where_the_server_tells_them() {
    let mut setup = Setup::default();
    setup.config.api.prompt_tokens_details = true;
    let server = setup.start().await;
    let prompt = "x".repeat(100);
    let request = |stream: bool| {
        let options = if stream { json!({"include_usage": true}) } else { json!(null) };
        server.completion(json!({"prompt": prompt, "max_tokens": 2, "stream": stream, "stream_options": options}))
    };
    assert_eq!(ok(request(false)).await["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(ok(request(false)).await["usage"]["prompt_tokens_details"]["cached_tokens"], 96);
    let streamed = events(request(true)).await;
    assert_eq!(streamed.last().unwrap()["usage"]["prompt_tokens_details"]["cached_tokens"], 96);
}

#[tokio::test]
async fn usage_may_be_forced() {
    let mut setup = Setup::default();
    setup.config.api.force_include_usage = true;
    let server = setup.start().await;
    let events = events(server.chat(json!({"stream": true}))).await;
    assert!(events.iter().all(|event| event["usage"].is_object()), "{events:?}");
    assert_eq!(events.last().unwrap()["choices"], json!([]));
}

#[tokio::test]
async fn a_template_of_the_clients_own_needs_the_servers_trust() {
    let own = json!({"chat_template": "{{ messages[0].content }}"});
    let server = Setup::default().start().await;
    let refused = server.chat(own.clone()).send().await.unwrap();
    assert!(refused.text().await.unwrap().contains("--trust-request-chat-template is not set"));
    // A helper that answers nothing has been stopped, and one that does not start is an error of the server.
    for (program, status) in [("/bin/true", 400), ("/no/such/program", 500)] {
        let mut setup = Setup::default();
        setup.config.api.template_helper = Some(TemplateHelper { program: program.into(), args: vec![] });
        let answer = setup.start().await.chat(own.clone()).send().await.unwrap();
        assert_eq!(answer.status(), status);
        assert_eq!(answer.text().await.unwrap().contains("too much memory, stack or time"), status == 400);
    }
}

#[tokio::test]
async fn an_output_that_repeats_itself_may_be_ended() {
    let server = Setup::saying(&[" one", " two"]).start().await;
    let detection = json!({"max_pattern_size": 4, "min_count": 3});
    let body = ok(server.chat(json!({"repetition_detection": detection, "max_tokens": 50}))).await;
    assert_eq!(body["choices"][0]["finish_reason"], "repetition");
    assert_eq!(body["usage"]["completion_tokens"], 6);
}
