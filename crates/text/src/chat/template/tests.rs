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

/// The expected texts are those of Jinja 3.1.6 in transformers 5.24.0.
#[test]
fn strings_are_formatted_as_in_python() {
    for (source, text) in [
        ("{{ '%s and %d' % ('a', 3) }}", "a and 3"),
        ("{{ '%s' % messages }}", "[{'role': 'user'}]"),
        ("{{ '%s|%s' % (none, 1.0) }}", "None|1.0"),
        ("{{ '%5.2f|%-4s|%04d' % (2.5, 'a', 7) }}", " 2.50|a   |0007"),
        ("{{ '%(role)s' % messages[0] }}", "user"),
        ("{{ '100%%' % () }}", "100%"),
        ("{{ '%s' % 'a'|upper ~ 'b' }}", "Ab"),
        ("{{ 'a' ~ '%s' % 'b' }}", "ab"),
        ("{{ '%r %s' % ('q', true) }}", "'q' True"),
        ("{{ '%s' % messages[0].role.upper() }}", "USER"),
        ("{{ '%s' % -1 }}{{ '%d' % 3.7 }}", "-13"),
        ("{{ '%x %o %e %g %c %i %%' % (255, 8, 1.5, 0.0001, 'z', 4) }}", "ff 10 1.500000e+00 0.0001 z 4 %"),
        ("{{ '%s' % '50%' }}{{ \"'%s'\" % 1 }}", "50%'1'"),
        ("{{ '%s %s'|format(messages, none) }}", "[{'role': 'user'}] None"),
        ("{{ '%(a)s'|format(a=[1]) }}", "[1]"),
        ("{{ '{} {}'.format(1.0, [1, 'a']) }}", "1.0 [1, 'a']"),
        ("{{ 7 % 4 }}{{ '%s' % ('%s' % 1) % 2 if false }}", "3"),
    ] {
        assert_eq!(render(source, json!([{"role": "user"}])).unwrap(), text, "{source}");
    }
    for source in ["{{ '%s %s' % 'a' }}", "{{ '%s' % ('a', 'b') }}", "{{ '%' % 1 }}", "{{ '%(a)s' % 1 }}"] {
        let error = render(source, json!([])).unwrap_err();
        assert!(matches!(error, TemplateError::Render(_)), "{source}: {error}");
    }
}

/// The expected texts are those of Jinja 3.1.6 in transformers 5.24.0.
#[test]
fn macros_catch_arguments() {
    for (source, text) in [
        (
            "{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, 3, k=4) }}|{{ f(1) }}",
            "1(2, 3){'k': 4}|1(){}",
        ),
        ("{% macro f() %}{{ varargs | join('-') }}{% endmacro %}\n{{ f(1, 2, 3) }}", "1-2-3"),
        (
            "{% macro f(a, b=2) %}{{ a }}{{ b }}{% for k, v in kwargs.items() %}{{ k }}={{ v }};{% endfor %}\
             {%- endmacro %}{{ f(1, z=1, y='q') }}",
            "12z=1;y=q;",
        ),
        ("{% macro f(a) %}{{ caller() }}{{ kwargs }}{% endmacro %}{% call f(1, x=2) %}in{% endcall %}", "in{'x': 2}"),
        (
            "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1, 7) }}{% endif %}{{ varargs }}{% endmacro %}{{ f(2, 9) }}",
            "210(7,)(7,)(9,)",
        ),
        ("{% macro g() %}{{ f(1, 2) }}{% endmacro %}{% macro f() %}{{ varargs }}{% endmacro %}{{ g() }}", "(1, 2)"),
    ] {
        assert_eq!(render(source, json!([])).unwrap(), text, "{source}");
    }
    for source in [
        "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}",
        "{% macro f(a) %}{{ kwargs }}{% endmacro %}{{ f(1, 2) }}",
        "{% macro f(a) %}{{ varargs }}{% endmacro %}{{ f(1, b=2) }}",
    ] {
        assert!(render(source, json!([])).is_err(), "{source}");
    }
}

#[test]
fn generation_blocks_are_scopes() {
    let source = "{% set x = 1 %}\n  {%- generation -%}  {% set x = 2 %}{{ x }}{%-endgeneration%}\n{{ x }}";
    assert_eq!(render(source, json!([])).unwrap(), "21");
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
