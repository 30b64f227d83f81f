//! POST /score and POST /rerank

use octavo_server::{Activation, PairFormat};
use serde_json::{Value, json};

use crate::pooling::{numbers, prompt, raw, refused};
use crate::support::{IM_END, Setup, TestServer, id, ok, with};

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The prompt of a pair by the tokenizer's template.
fn pair(query: &str, document: &str) -> Vec<u32> {
    [prompt(query), bytes(document), vec![IM_END]].concat()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn close(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5)
}

async fn scores(server: &TestServer, body: Value) -> Vec<f32> {
    let body = ok(server.post("/score", &body)).await;
    let items = body["data"].as_array().unwrap();
    items.iter().enumerate().for_each(|(index, item)| assert_eq!(item["index"], index));
    items.iter().map(|item| item["score"].as_f64().unwrap() as f32).collect()
}

#[tokio::test]
async fn a_cross_encoder_reads_each_pair_as_one_prompt() {
    let server = Setup::classifier(&["only"], Activation::Sigmoid).start().await;
    let expected = ["first", "second", ""].map(|document| sigmoid(raw(&pair("q", document), 1)[0]));
    for (first, second) in [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]
    {
        let body = json!({first: "q", second: ["first", "second", ""]});
        assert!(close(&scores(&server, body).await, &expected), "{first}");
    }
    let body = ok(server.post("/v1/score", &json!({"queries": ["q"], "documents": "first"}))).await;
    assert_eq!(
        (&body["id"], &body["object"], &body["model"], &body["data"][0]["object"]),
        (&json!("score-r"), &json!("list"), &json!("mock"), &json!("score"))
    );
    assert_eq!(body["usage"]["total_tokens"], pair("q", "first").len());
    let one_each = json!({"queries": ["a", "b"], "documents": ["c", "d"]});
    let expected = [("a", "c"), ("b", "d")].map(|(query, document)| sigmoid(raw(&pair(query, document), 1)[0]));
    assert!(close(&scores(&server, one_each).await, &expected));
    let logits = json!({"queries": "q", "documents": "first", "use_activation": false});
    assert!(close(&scores(&server, logits).await, &raw(&pair("q", "first"), 1)));
    server.idle().await;
}

#[tokio::test]
async fn the_engine_learns_where_the_second_text_begins() {
    let server = Setup::classifier(&["only"], Activation::Sigmoid).start().await;
    scores(&server, json!({"queries": "query", "documents": ["a", ""]})).await;
    let seen = server.seen.lock().unwrap().clone();
    assert_eq!(seen, [(pair("query", "a"), Some(7)), (pair("query", ""), Some(7))]);

    let mut setup = Setup::classifier(&["only"], Activation::Sigmoid);
    setup.pools().pairs = PairFormat::Template { token_types: false };
    let server = setup.start().await;
    let same = scores(&server, json!({"queries": "query", "documents": "a"})).await;
    assert!(close(&same, &[sigmoid(raw(&pair("query", "a"), 1)[0])]));
    assert_eq!(*server.seen.lock().unwrap(), [(pair("query", "a"), None)]);
}

#[tokio::test]
async fn a_bi_encoder_compares_vectors() {
    let server = Setup::embedder().start().await;
    let vector = |text: &str| raw(&prompt(text), 8);
    let expected = ["q", "other"].map(|document| cosine(&vector("q"), &vector(document)));
    let body = ok(server.post("/score", &json!({"queries": "q", "documents": ["q", "other"]}))).await;
    let got: Vec<f32> = body["data"].as_array().unwrap().iter().map(|x| x["score"].as_f64().unwrap() as f32).collect();
    assert!(close(&got, &expected) && close(&got[..1], &[1.0]), "{got:?}");
    // The query counts for each document, with a padding token between the texts, as in vLLM.
    assert_eq!(body["usage"]["prompt_tokens"], (3 + 1 + 3) + (3 + 1 + 7));
    let series = "vllm:prompt_tokens_total{engine=\"0\",model_name=\"mock\"}";
    assert_eq!(server.metric(series), 3.0 + 3.0 + 7.0, "the query was computed once");
    let one_each = json!({"queries": ["a", "b"], "documents": ["b", "b"]});
    assert!(close(&scores(&server, one_each).await, &[cosine(&vector("a"), &vector("b")), 1.0]));
}

#[tokio::test]
async fn pairs_of_decoders_are_joined() {
    let mut setup = Setup::classifier(&["only"], Activation::Sigmoid);
    setup.pools().pairs = PairFormat::Joined;
    let server = setup.start().await;
    let expected = ["d", "e"].map(|document| sigmoid(raw(&prompt(&format!("query{document}")), 1)[0]));
    assert!(close(&scores(&server, json!({"queries": "query", "documents": ["d", "e"]})).await, &expected));
    let limited =
        json!({"queries": "query", "documents": "document", "max_tokens_per_query": 2, "max_tokens_per_doc": 3});
    assert!(close(&scores(&server, limited).await, &[sigmoid(raw(&prompt("qudoc"), 1)[0])]));
}

#[tokio::test]
async fn pairs_of_a_chat_template_are_two_messages() {
    let mut setup = Setup::classifier(&["only"], Activation::Sigmoid);
    setup.pools().pairs = PairFormat::ChatTemplate;
    let server = setup.start().await;
    let message = |role: &str, content: &str| {
        [vec![id("<|im_start|>")], bytes(&format!("{role}\n{content}")), vec![IM_END, u32::from(b'\n')]].concat()
    };
    let rendered = |query: &str, document: &str| {
        let messages = [message("query", query), message("document", document)].concat();
        [vec![id("<|im_start|>")], messages, vec![IM_END]].concat()
    };
    let body = json!({"queries": "query", "documents": "text"});
    assert!(close(&scores(&server, body).await, &[sigmoid(raw(&rendered("query", "text"), 1)[0])]));
    let limited = json!({"queries": "query", "documents": "text", "max_tokens_per_query": 2, "max_tokens_per_doc": 3});
    assert!(close(&scores(&server, limited).await, &[sigmoid(raw(&rendered("qu", "tex"), 1)[0])]));
}

#[tokio::test]
async fn a_template_of_pairs_has_the_variables_of_the_request() {
    let mut setup = Setup::classifier(&["only"], Activation::Sigmoid);
    setup.template = "{{ instruction }}{{ more }}: {{ messages[0].content }}, {{ messages[1].content }}";
    setup.pools().pairs = PairFormat::ChatTemplate;
    setup.config.api.template_kwargs = json!({"more": "~", "instruction": "the server's"}).as_object().unwrap().clone();
    let server = setup.start().await;
    let body = json!({"query": "a", "documents": ["b"], "instruction": "Judge"});
    let answer = ok(server.post("/rerank", &body)).await;
    assert_eq!(*server.seen.lock().unwrap(), [(prompt("Judge~: a, b"), None)]);
    let expected = sigmoid(raw(&prompt("Judge~: a, b"), 1)[0]);
    assert!(close(&numbers(&json!([answer["results"][0]["relevance_score"]])), &[expected]));
}

#[tokio::test]
async fn the_longer_text_of_a_pair_is_truncated_first() {
    let server = Setup::classifier(&["only"], Activation::Identity).start().await;
    for (rest, query, document) in [
        (json!({"truncate_prompt_tokens": 9}), "qu", "docu"),
        (json!({"truncate_prompt_tokens": 9, "truncation_side": "left"}), "qu", "ment"),
        (json!({"truncate_prompt_tokens": 6}), "q", "do"),
        (json!({"max_tokens_per_doc": 3}), "qu", "doc"),
        (json!({"max_tokens_per_query": 1, "max_tokens_per_doc": 3}), "q", "doc"),
        (json!({"max_tokens_per_doc": 3, "truncate_prompt_tokens": 7}), "qu", "do"),
    ] {
        let body = with(json!({"queries": "qu", "documents": "document"}), rest);
        assert_eq!(scores(&server, body.clone()).await, raw(&pair(query, document), 1), "{body}");
    }
    let long = json!({"queries": "q", "documents": "x".repeat(4093)});
    assert!(refused(&server, "/score", long, 400).await.contains("4097 input tokens"));
    let longer = json!({"queries": "q", "documents": "x".repeat(100_000)});
    assert!(refused(&server, "/score", longer.clone(), 400).await.contains("at least 4097 input tokens"));
    let cut = with(longer, json!({"truncate_prompt_tokens": -1}));
    assert_eq!(scores(&server, cut).await, raw(&pair("q", &"x".repeat(4092)), 1));
}

#[tokio::test]
async fn documents_are_ranked_by_their_scores() {
    let server = Setup::classifier(&["only"], Activation::Sigmoid).start().await;
    let documents = ["one", "two", "three", "four"];
    let body = json!({"query": "q", "documents": ["one", {"text": "two"}, "three", "four"], "return_documents": false});
    let mut answers = vec![];
    for path in ["/rerank", "/v1/rerank", "/v2/rerank"] {
        answers.push(ok(server.post(path, &body)).await);
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]));
    let ranking = &answers[0];
    let keys: Vec<&String> = ranking.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["id", "model", "usage", "results"]);
    assert_eq!(ranking["id"], "score-r");
    let tokens: usize = documents.iter().map(|document| pair("q", document).len()).sum();
    assert_eq!(ranking["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    let results = ranking["results"].as_array().unwrap();
    let mut expected: Vec<(usize, f32)> =
        documents.iter().map(|document| sigmoid(raw(&pair("q", document), 1)[0])).enumerate().collect();
    expected.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (result, (index, score)) in results.iter().zip(&expected) {
        assert_eq!(result["index"], *index);
        assert_eq!(result["document"], json!({"text": documents[*index], "multi_modal": null}));
        assert!((result["relevance_score"].as_f64().unwrap() as f32 - score).abs() < 1e-6);
    }
    assert_eq!(results.len(), 4);
    for (top_n, count) in [(0, 4), (2, 2), (9, 4)] {
        let top = ok(server.post("/rerank", &with(body.clone(), json!({"top_n": top_n})))).await;
        assert_eq!(top["results"], json!(results[..count]), "{top_n}");
        assert_eq!(top["usage"]["total_tokens"], tokens, "all were read");
    }
}

#[tokio::test]
async fn an_embedder_ranks_too() {
    let server = Setup::embedder().start().await;
    let body = ok(server.post("/rerank", &json!({"query": "b", "documents": ["a", "b", "c"], "top_n": 1}))).await;
    assert_eq!((&body["results"][0]["index"], body["results"].as_array().unwrap().len()), (&json!(1), 1));
    assert!(close(&numbers(&json!([body["results"][0]["relevance_score"]])), &[1.0]));
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let server = Setup::classifier(&["only"], Activation::Sigmoid).start().await;
    let pair = |rest: Value| with(json!({"queries": "a", "documents": ["b"]}), rest);
    for (path, body, words) in [
        ("/score", json!({}), "('body', 'queries')"),
        ("/score", json!({"queries": ["a", "b"], "documents": ["c"]}), "Input lengths must be either 1:1, 1:N or N:N"),
        ("/score", json!({"queries": [], "documents": ["c"]}), "At least one text element must be given"),
        ("/score", json!({"queries": "a", "documents": []}), "At least one text_pair element must be given"),
        ("/score", json!({"queries": "a", "documents": [1]}), "('body', 'documents', 0)"),
        ("/score", json!({"queries": "a", "documents": vec!["b"; 1025]}), "at most 1024 elements, got 1025"),
        ("/score", pair(json!({"normalize": true})), "Parameter `normalize` was removed"),
        ("/score", pair(json!({"max_tokens_per_doc": -1})), "max_tokens_per_doc must be a non-negative integer"),
        (
            "/score",
            pair(json!({"max_tokens_per_query": 4096})),
            "max_tokens_per_query (4096) must be less than max_model_len (4096).",
        ),
        ("/rerank", json!({"query": "a"}), "('body', 'documents')"),
        ("/rerank", json!({"query": ["a"], "documents": ["b"]}), "('body', 'query')"),
        ("/rerank", json!({"query": "a", "documents": ["b"], "top_n": -1}), "greater than or equal to 0"),
        ("/rerank", json!({"query": "a", "documents": []}), "At least one text_pair element must be given"),
    ] {
        let message = refused(&server, path, body, 400).await;
        assert!(message.contains(words), "{message}");
    }
    refused(&server, "/rerank", json!({"query": "a", "documents": ["b"], "model": "other"}), 404).await;
}
