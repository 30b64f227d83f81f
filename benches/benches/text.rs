//! Benches of text processing on both sides of the engine: encoding, detokenising, chat template, server-sent events.
//!
//! The vocabulary is the small one of octavo-text's tests, so that nothing has to be downloaded. A look-up in a larger
//! one costs the same, except for cache misses.
#![allow(missing_docs, reason = "criterion's macros")]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use octavo_server::internals::ChatEvents;
use octavo_text::{ChatTemplate, GgufVocabulary, SpecialTokens, TemplateInput, TextOptions, TextStream, Tokenizer};
use serde_json::{Map, Value, json};

const VOCABULARY: &str = include_str!("../../crates/text/tests/data/byte_level.json");
const CHATML: &str = include_str!("../../crates/text/tests/data/templates/chatml.jinja");
const QWEN3: &str = include_str!("../../crates/text/tests/data/templates/qwen3.jinja");
const PROSE: &str =
    "The server reads a request, renders its template, and puts the tokens in a queue; 12 of them wait. ";

fn tokenizer() -> Arc<Tokenizer> {
    let data: Value = serde_json::from_str(VOCABULARY).expect("the vocabulary is JSON");
    let strings = |key: &str| data[key].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let types = data["token_types"].as_array().into_iter().flatten().filter_map(Value::as_i64);
    let vocabulary = GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: Some("smollm".to_owned()),
        tokens: strings("tokens"),
        token_types: types.map(|kind| kind as i32).collect(),
        merges: strings("merges"),
        ..GgufVocabulary::default()
    };
    Arc::new(Tokenizer::from_gguf(&vocabulary).expect("the vocabulary is whole"))
}

fn encode(criterion: &mut Criterion) {
    let tokenizer = tokenizer();
    let mut group = criterion.benchmark_group("encode");
    for (name, text) in [
        ("prose_4_KiB", PROSE.repeat(41)),
        ("one_letter_64_KiB", "a".repeat(1 << 16)),
        ("spaces_64_KiB", " ".repeat(1 << 16)),
        ("emoji_64_KiB", "😀".repeat(1 << 14)),
    ] {
        group.throughput(Throughput::Bytes(text.len() as u64));
        group.sample_size(20);
        group.bench_function(name, |bencher| bencher.iter(|| tokenizer.encode(black_box(&text), false)));
    }
    group.finish();
}

fn detokenise(criterion: &mut Criterion) {
    let tokenizer = tokenizer();
    let ids = tokenizer.encode(&PROSE.repeat(40), false).expect("text encodes");
    let mut group = criterion.benchmark_group("detokenise_per_token");
    group.throughput(Throughput::Elements(ids.len() as u64));
    let strings = |list: &[&str]| list.iter().map(|&stop| stop.to_owned()).collect::<Vec<_>>();
    for (name, stop) in [
        ("no_stop", Vec::new()),
        ("four_stops", strings(&["\n\nUser:", "<|im_end|>", "in a queue!", "of them waited"])),
        ("ten_thousand_stops", (0..10_000).map(|i| format!("the end of {i}")).collect()),
    ] {
        let options = TextOptions { stop: stop.into(), ..TextOptions::default() };
        group.bench_function(name, |bencher| {
            bencher.iter_batched(
                || TextStream::new(Arc::clone(&tokenizer), &[], options.clone()),
                |mut stream| {
                    for &id in &ids {
                        black_box(stream.push(id));
                    }
                    stream
                },
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

fn template(criterion: &mut Criterion) {
    let conversation = |turns: usize| -> Vec<Value> {
        (0..turns).map(|i| json!({"role": if i % 2 == 0 { "user" } else { "assistant" }, "content": PROSE})).collect()
    };
    let tools = [json!({"type": "function", "function": {"name": "search", "description": PROSE, "parameters":
        {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}}})];
    let mut group = criterion.benchmark_group("render");
    for (name, source, turns, tools) in [
        ("chatml_1_turn", CHATML, 1, None),
        ("chatml_101_turns", CHATML, 101, None),
        ("qwen3_9_turns_1_tool", QWEN3, 9, Some(&tools[..])),
    ] {
        let template = ChatTemplate::new(source, &SpecialTokens::default()).expect("the template compiles");
        let messages = conversation(turns);
        let kwargs = Map::new();
        let input = TemplateInput {
            messages: &messages,
            tools,
            documents: None,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: &kwargs,
        };
        group.bench_function(name, |bencher| bencher.iter(|| template.render(black_box(&input))));
    }
    group.finish();
}

fn sse(criterion: &mut Criterion) {
    let mut events = ChatEvents::new(tokenizer());
    let mut group = criterion.benchmark_group("sse_per_token");
    group.throughput(Throughput::Elements(1));
    group.bench_function("chat", |bencher| bencher.iter(|| events.text(black_box(" word".to_owned()))));
    group.finish();
}

criterion_group!(benches, encode, detokenise, template, sse);
criterion_main!(benches);
