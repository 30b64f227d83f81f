//! POST /classify

use octavo_server::Activation;
use serde_json::json;

use crate::pooling::{numbers, prompt, raw, refused};
use crate::support::{Setup, ok};

const LABELS: [&str; 3] = ["good", "bad", "odd"];

#[tokio::test]
async fn texts_get_the_likeliest_label() {
    let server = Setup::classifier(&LABELS, Activation::Softmax).start().await;
    let body = ok(server.post("/classify", &json!({"input": ["a", "b", "c"], "user": "u"}))).await;
    assert_eq!((&body["id"], &body["object"], &body["model"]), (&json!("classify-r"), &json!("list"), &json!("mock")));
    assert!(body["created"].is_u64());
    for (index, text) in ["a", "b", "c"].iter().enumerate() {
        let (item, scores) = (&body["data"][index], raw(&prompt(text), 3));
        let best = (0..3).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap();
        assert_eq!(
            (&item["index"], &item["label"], &item["num_classes"]),
            (&json!(index), &json!(LABELS[best]), &json!(3))
        );
        let powers = scores.iter().map(|x| x.exp());
        let sum: f32 = powers.clone().sum();
        for (probability, power) in numbers(&item["probs"]).iter().zip(powers) {
            assert!((probability - power / sum).abs() < 1e-6);
        }
    }
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0, "prompt_tokens_details": null,
            "completion_tokens_details": null})
    );
    let keys: Vec<&String> = body.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["id", "object", "created", "model", "data", "usage"]);
    server.idle().await;
}

#[tokio::test]
async fn scores_may_stay_as_they_are() {
    let server = Setup::classifier(&["only"], Activation::Sigmoid).start().await;
    let body = ok(server.post("/classify", &json!({"input": "x", "use_activation": false}))).await;
    assert_eq!(numbers(&body["data"][0]["probs"]), raw(&prompt("x"), 1));
    let body = ok(server.post("/classify", &json!({"input": "x"}))).await;
    let expected = 1.0 / (1.0 + (-raw(&prompt("x"), 1)[0]).exp());
    assert!((numbers(&body["data"][0]["probs"])[0] - expected).abs() < 1e-6);
    assert_eq!(body["data"][0]["label"], "only");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(ok(server.post("/classify", &chat)).await["usage"]["prompt_tokens"], 10);
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let server = Setup::classifier(&LABELS, Activation::Identity).start().await;
    for (body, words) in [
        (json!({}), "input"),
        (json!({"input": "x", "normalize": true}), "use `use_activation` instead"),
        (json!({"input": "x".repeat(5000)}), "maximum context length is 4096"),
        (json!({"input": "x", "truncation_side": "up"}), "Input should be 'left' or 'right'"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}),
            "image(s)",
        ),
    ] {
        let message = refused(&server, "/classify", body, 400).await;
        assert!(message.contains(words), "{message}");
    }
    let model = refused(&server, "/classify", json!({"input": "x", "model": "other"}), 404).await;
    assert!(model.contains("The model `other` does not exist."), "{model}");
}
