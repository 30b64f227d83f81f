//! Models that return vectors: embeddings, scores and classes are PyTorch's, and what a model cannot do is refused.

use std::path::{Path, PathBuf};

use octavo_tests::Server;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

use crate::OCTAVO;

/// Maximum difference of a number from PyTorch's: the processor keeps keys and values of a step in bf16, and multiplies
/// bf16 weights with activations in bf16 where it can.
const TOLERANCE: f64 = 0.03;

/// A model of random weights.
fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata").join(name)
}

fn server(name: &str, args: &[&str]) -> Server {
    Server::start(Path::new(OCTAVO), &model(name), &[&["--device", "cpu", "--cpu-threads", "2"], args].concat())
}

/// The texts of a checkpoint with PyTorch's vectors.
fn cases(name: &str) -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(model(name).join("golden.json")).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list")).iter().map(|x| x.as_f64().unwrap()).collect()
}

fn assert_near(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= TOLERANCE, "{what}: {found} instead of {expected}");
    }
}

fn normalised(vector: &[f64]) -> Vec<f64> {
    let length = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
    vector.iter().map(|x| x / length).collect()
}

/// Copies a model of bf16 weights with its weights in f32.
fn in_float32(from: &Path, into: &Path) {
    std::fs::create_dir_all(into).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let (path, copy) = (entry.path(), into.join(entry.file_name()));
        if path.is_dir() {
            in_float32(&path, &copy);
        } else {
            std::fs::copy(path, copy).unwrap();
        }
    }
    if !into.join("model.safetensors").exists() {
        return;
    }
    let bytes = std::fs::read(into.join("model.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let widened: Vec<(String, Vec<usize>, Vec<u8>)> = stored
        .iter()
        .map(|(name, view)| {
            let data = match view.dtype() {
                // A bf16 is the upper half of an f32.
                Dtype::BF16 => view.data().as_chunks().0.iter().flat_map(|&[low, high]| [0, 0, low, high]).collect(),
                _ => view.data().to_vec(),
            };
            (name.to_owned(), view.shape().to_vec(), data)
        })
        .collect();
    let views =
        widened.iter().map(|(name, shape, data)| (name, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &into.join("model.safetensors")).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_in_float32_are_kept_in_16_bits_unless_a_flag_keeps_them() {
    let folder = tempfile::tempdir().unwrap();
    in_float32(&model("bert-sentence"), folder.path());
    let cases: Vec<_> = cases("bert-sentence").into_iter().filter(|case| case["pair"].is_null()).collect();
    for (args, kept) in [(&[][..], false), (&["--dtype", "float32"], true)] {
        let args = [&["--device", "cpu", "--cpu-threads", "2"], args].concat();
        let server = Server::start(Path::new(OCTAVO), folder.path(), &args);
        let log = server.start_log();
        assert_eq!(log.contains("weights in F32 are kept as BF16"), !kept, "{log}");
        for case in &cases {
            let (status, answer) = server.post("/v1/embeddings", &json!({"input": case["text"]})).await;
            assert_eq!(status, 200, "{answer}");
            let expected = normalised(&numbers(&case["vector"]));
            assert_near(&numbers(&answer["data"][0]["embedding"]), &expected, "an embedding");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn embeddings_are_those_of_pytorch() {
    let server = server("bert-sentence", &[]);
    // The texts of a pair are embedded one by one, so only single texts have a golden.
    let cases: Vec<_> = cases("bert-sentence").into_iter().filter(|case| case["pair"].is_null()).collect();
    let texts: Vec<_> = cases.iter().map(|case| case["text"].clone()).collect();
    let (status, answer) = server.post("/v1/embeddings", &json!({"input": texts})).await;
    assert_eq!(status, 200, "{answer}");
    for (case, item) in cases.iter().zip(answer["data"].as_array().unwrap()) {
        assert_near(&numbers(&item["embedding"]), &normalised(&numbers(&case["vector"])), "an embedding");
    }
    // Token ids are taken as they are, also those of a pair.
    let all = self::cases("bert-sentence");
    for case in &all {
        let body = json!({"input": case["ids"], "use_activation": false});
        let (_, answer) = server.post("/v1/embeddings", &body).await;
        assert_eq!(answer["usage"]["prompt_tokens"], case["ids"].as_array().unwrap().len(), "{answer}");
        // A pair that is given as ids has no types, so only single texts are compared.
        if case["pair"].is_null() {
            assert_near(&numbers(&answer["data"][0]["embedding"]), &numbers(&case["vector"]), "a raw embedding");
        }
    }
    let (status, answer) = server.post("/pooling", &json!({"input": texts[0], "task": "token_embed"})).await;
    assert_eq!(status, 200, "{answer}");
    let rows = answer["data"][0]["data"].as_array().unwrap();
    assert_eq!(rows.len(), cases[0]["ids"].as_array().unwrap().len(), "a vector for each token");
    assert_eq!(numbers(&rows[0]).len(), 20, "through the Dense module");
}

#[tokio::test(flavor = "multi_thread")]
async fn classes_are_those_of_pytorch() {
    let server = server("bert-classifier", &[]);
    let case = cases("bert-classifier").into_iter().find(|case| case["pair"].is_null()).unwrap();
    let (status, answer) = server.post("/classify", &json!({"input": case["text"]})).await;
    assert_eq!(status, 200, "{answer}");
    let item = &answer["data"][0];
    let scores = numbers(&case["vector"]);
    let sum: f64 = scores.iter().map(|x| x.exp()).sum();
    let expected: Vec<f64> = scores.iter().map(|x| x.exp() / sum).collect();
    assert_near(&numbers(&item["probs"]), &expected, "the classes");
    let most = (0..3).max_by(|&a, &b| expected[a].total_cmp(&expected[b])).unwrap();
    assert_eq!(item["label"], ["negative", "neutral", "positive"][most]);
    assert_eq!(item["num_classes"], 3);
    let (status, answer) = server.post("/score", &json!({"text_1": "a", "text_2": "b"})).await;
    assert!(status >= 400, "a classifier with three classes scores no pairs: {answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pairs_are_scored_as_pytorch_scores_them() {
    let server = server("bert-reranker", &[]);
    let cases: Vec<_> = cases("bert-reranker").into_iter().filter(|case| !case["pair"].is_null()).collect();
    assert_eq!(cases.len(), 2);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for case in &cases {
        let body = json!({"text_1": case["text"], "text_2": [case["pair"], case["pair"]]});
        let (status, answer) = server.post("/v1/score", &body).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["usage"]["prompt_tokens"], 2 * case["ids"].as_array().unwrap().len(), "{answer}");
        let expected = sigmoid(numbers(&case["vector"])[0]);
        for item in answer["data"].as_array().unwrap() {
            assert_near(&[item["score"].as_f64().unwrap()], &[expected], "a score");
        }
    }
    let documents: Vec<_> = cases.iter().map(|case| case["pair"].clone()).collect();
    let body = json!({"query": cases[0]["text"], "documents": documents, "top_n": 1});
    let (status, best) = server.post("/v2/rerank", &body).await;
    assert_eq!(status, 200, "{best}");
    let (_, all) = server.post("/rerank", &json!({"query": cases[0]["text"], "documents": documents})).await;
    let scores: Vec<f64> =
        all["results"].as_array().unwrap().iter().map(|r| r["relevance_score"].as_f64().unwrap()).collect();
    assert!(scores.len() == 2 && scores[0] >= scores[1], "{all}");
    assert_eq!(best["results"], json!([all["results"][0]]));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_texts_at_once_are_those_of_one() {
    let server = server("bert-sentence", &["--max-num-seqs", "7"]);
    let text = |n: usize| "a sheet of sixteen pages ".repeat(1 + n % 9);
    let mut alone = Vec::new();
    for n in 0..9 {
        alone.push(server.post("/v1/embeddings", &json!({"input": text(n)})).await.1["data"][0]["embedding"].clone());
    }
    let many: Vec<String> = (0..90).map(text).collect();
    let (status, answer) = server.post("/v1/embeddings", &json!({"input": many})).await;
    assert_eq!(status, 200, "{answer}");
    for (n, item) in answer["data"].as_array().unwrap().iter().enumerate() {
        assert_eq!(item["embedding"], alone[n % 9], "text {n}: the bits do not depend on the texts beside it");
    }
    let name = r#"model_name="default""#;
    let value = async |metric: &str| server.metric(metric, name).await;
    server.reaches("vllm:request_success_total", r#"finished_reason="stop""#, 99.0).await;
    assert_eq!(value("vllm:generation_tokens_total").await, 0.0);
    assert_eq!(value("vllm:prefix_cache_hits_total").await, 0.0, "no prefix cache");
    server.idle().await;
    assert!(value("vllm:prompt_tokens_total").await > 99.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_model_does_not_do_is_not_there() {
    let server = server("bert-sentence", &[]);
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    for (route, body) in [
        ("/v1/chat/completions", &chat),
        ("/v1/completions", &json!({"prompt": "a"})),
        ("/classify", &json!({"input": "a"})),
    ] {
        assert_eq!(server.post(route, body).await.0, 404, "{route}");
    }
    let long = "sheet ".repeat(100);
    let (status, answer) = server.post("/v1/embeddings", &json!({"input": long})).await;
    assert_eq!(status, 400, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("60"), "the limit is named: {answer}");
    let (status, _) = server.post("/v1/embeddings", &json!({"input": long, "truncate_prompt_tokens": -1})).await;
    assert_eq!(status, 200);
    let (status, answer) = server.post("/v1/embeddings", &json!({"input": "a", "dimensions": 8})).await;
    assert!(status == 400 && answer["error"]["message"].as_str().unwrap().contains("Matryoshka"), "{answer}");
    drop(server);

    // A flag makes it one.
    let server = self::server("bert-sentence", &["--hf-overrides", r#"{"is_matryoshka": true}"#]);
    let (status, answer) = server.post("/v1/embeddings", &json!({"input": "a", "dimensions": 8})).await;
    assert_eq!(status, 200, "{answer}");
    let vector = numbers(&answer["data"][0]["embedding"]);
    assert!(vector.len() == 8 && (vector.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5, "{answer}");
}
