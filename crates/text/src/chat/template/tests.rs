use std::cell::Cell;

use serde_json::json;

use super::*;

fn render(source: &str, messages: Json) -> Result<String, TemplateError> {
    render_with(source, messages, json!({}))
}

fn render_with(source: &str, messages: Json, kwargs: Json) -> Result<String, TemplateError> {
    let special = SpecialTokens { bos: Some("<s>".to_owned()), ..SpecialTokens::default() };
    let template = ChatTemplate::with_clock(source, &special, || DateTime::constant(1970, 1, 1, 0, 0, 0, 0))?;
    template.render(&TemplateInput {
        messages: messages.as_array().unwrap(),
        tools: None,
        documents: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: kwargs.as_object().unwrap(),
    })
}

#[test]
fn raise_exception_carries_its_message() {
    let source = "{% macro check(m) %}{{ raise_exception('roles must alternate: ' ~ m.role) }}{% endmacro %}\
                  {% for m in messages %}{{ check(m) }}{% endfor %}";
    let error = render(source, json!([{"role": "user"}])).unwrap_err();
    assert!(matches!(&error, TemplateError::Raised(message) if message == "roles must alternate: user"), "{error:?}");
    assert_eq!(error.to_string(), "the chat template refused the messages: roles must alternate: user");
}

#[test]
fn endless_templates_end() {
    let loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    assert!(matches!(render(loops, json!([])), Err(TemplateError::TooManySteps(MAX_STEPS))));
    let writes = "{% for a in range(100000) %}{{ 'x' * 10000 }}{% endfor %}";
    assert!(matches!(render(writes, json!([])), Err(TemplateError::TooLong(MAX_OUTPUT))));
    let recurses = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(matches!(render(recurses, json!([])), Err(TemplateError::Render(_))));
    let huge = "{{ 'x' * 100000000000 }}";
    assert!(matches!(render(huge, json!([])), Err(TemplateError::Render(_))));
}

#[test]
fn rendering_pauses_at_each_message_and_ends_at_the_pause_that_fails() {
    let source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let template = ChatTemplate::new(source, &SpecialTokens::default()).unwrap();
    let messages = vec![json!({"role": "user", "content": "hi"}); 1000];
    let (kwargs, pauses) = (Map::new(), Cell::new(0));
    let input = TemplateInput {
        messages: &messages,
        tools: None,
        documents: None,
        add_generation_prompt: false,
        continue_final_message: false,
        kwargs: &kwargs,
    };
    let render = |last: usize| {
        pauses.set(0);
        template.render_in_turns(&input, || {
            pauses.set(pauses.get() + 1);
            if pauses.get() == last { Err(TemplateError::Stopped) } else { Ok(()) }
        })
    };
    assert_eq!(render(usize::MAX).unwrap(), "user: hi\n".repeat(1000));
    assert!(matches!(render(7), Err(TemplateError::Stopped)));
    assert_eq!(pauses.get(), 7);
    assert!(render(usize::MAX).is_ok() && pauses.get() >= 1000);
}

#[test]
fn failures_say_what_and_where() {
    let error = render("line\n{{ messages[0].role }}", json!([])).unwrap_err().to_string();
    assert!(error.starts_with("the chat template failed: ") && error.contains("chat_template:2"), "{error}");
    let error = render("a\nb\n{% if %}", json!([])).unwrap_err().to_string();
    assert!(error.starts_with("the chat template has a syntax error: ") && error.contains(":3"), "{error}");
    let error = render("{{ messages | nonsense }}", json!([])).unwrap_err().to_string();
    assert!(error.contains("nonsense"), "{error}");
    let error = render("{% for m in messages[::-1] %}{% endfor %}", json!([])).unwrap_err().to_string();
    assert!(error.contains("panicked"), "{error}");
    let error = render("{{ missing | tojson }}", json!([])).unwrap_err().to_string();
    assert!(error.contains("not JSON serializable"), "{error}");
}

#[test]
fn fixed_variables_win_over_kwargs_and_kwargs_over_special_tokens() {
    let source = "{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ tools }}{{ enable_thinking }}{{ messages | length }}";
    let kwargs = json!({"enable_thinking": false, "messages": [1, 2], "tools": "x", "add_generation_prompt": 0});
    assert_eq!(render_with(source, json!([]), kwargs).unwrap(), "<s>TrueNoneFalse0");
    assert_eq!(render_with("{{ bos_token }}", json!([]), json!({"bos_token": "B"})).unwrap(), "B");
}

#[test]
fn dates_come_from_the_clock() {
    assert_eq!(render("{{ strftime_now('%d %b %Y') }}", json!([])).unwrap(), "01 Jan 1970");
}

#[test]
fn undefined_values_have_no_length() {
    assert_eq!(render("{{ missing | length }}{{ missing | count }}{{ 'ab' | length }}", json!([])).unwrap(), "002");
    assert!(render("{{ none | length }}", json!([])).is_err());
}

/// The expected values are those of Jinja 3.1.6.
#[test]
fn sequences_and_iterables_are_those_of_jinja() {
    let tested = ["'abc'", "[]", "{}", "nothing", "none", "1", "true", "(1,)", "messages[0]", "'a' | list"];
    for test in ["sequence", "iterable"] {
        let source: Vec<String> = tested.iter().map(|value| format!("{{{{ {value} is {test} }}}}")).collect();
        assert_eq!(
            render(&source.join(" "), json!([{"role": "user"}])).unwrap(),
            "True True True True False False False True True True",
            "{test}"
        );
    }
}

#[test]
fn generation_blocks_are_scopes() {
    let source = "{% set x = 1 %}\n  {%- generation -%}  {% set x = 2 %}{{ x }}{%-endgeneration%}\n{{ x }}";
    assert_eq!(render(source, json!([])).unwrap(), "21");
    assert_eq!(without_generation_tags("{% generation %}{% if generation %}"), "{% with %}{% if generation %}");
}

#[test]
fn continuing_the_final_message() {
    let continued = |source: &str, messages: Json| {
        let template = ChatTemplate::new(source, &SpecialTokens::default()).unwrap();
        template.render(&TemplateInput {
            messages: messages.as_array().unwrap(),
            tools: None,
            documents: None,
            add_generation_prompt: false,
            continue_final_message: true,
            kwargs: &Map::new(),
        })
    };
    let plain = "{% for m in messages %}<{{ m.content }}>\n{% endfor %}";
    let trimming = "{% for m in messages %}<{{ m.content | trim }}>\n{% endfor %}";
    let messages = json!([{"content": "a"}, {"content": "The answer is "}]);
    assert_eq!(continued(plain, messages.clone()).unwrap(), "<a>\n<The answer is ");
    assert_eq!(continued(trimming, messages).unwrap(), "<a>\n<The answer is");
    let parts = "{% for m in messages %}<{% for c in m.content %}{{ c.text }}{% endfor %}>{% endfor %}";
    let messages = json!([{"content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]);
    assert_eq!(continued(parts, messages).unwrap(), "<xy");
    for (source, messages) in [
        (plain, json!([])),
        (plain, json!([{"content": null}])),
        (plain, json!([{"content": []}])),
        ("{{ messages | length }}", json!([{"content": "a"}])),
        ("{{ messages[0].content | upper }}", json!([{"content": "a"}])),
    ] {
        assert!(matches!(continued(source, messages), Err(TemplateError::ContinueFinalMessage(_))), "{source}");
    }
}
