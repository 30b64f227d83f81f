//! Calls as models write them.

use octavo_text::ToolSyntax;
use serde_json::{Map, Value, json};

use crate::Calls;

/// Returns definitions of tools that accept these calls.
pub(crate) fn definitions(calls: &Calls) -> Vec<Value> {
    let tool = |(name, arguments): &(String, Map<String, Value>)| {
        let properties = arguments.iter().map(|(name, value)| {
            let kind = match value {
                Value::Null => "null",
                Value::Bool(_) => "boolean",
                Value::Number(_) => "integer",
                Value::String(_) => "string",
                Value::Array(_) => "array",
                Value::Object(_) => "object",
            };
            (name.clone(), json!({"type": kind}))
        });
        let parameters = json!({"type": "object", "properties": properties.collect::<Map<_, _>>()});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    calls.iter().map(tool).collect()
}

fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => {
            let escaped = text.replace('\\', "\\\\").replace('\'', "\\'").replace('\n', "\\n").replace('\t', "\\t");
            format!("'{escaped}'")
        }
        Value::Array(items) => format!("[{}]", items.iter().map(python).collect::<Vec<_>>().join(", ")),
        Value::Object(members) => {
            let member = |(key, value): (&String, &Value)| format!("{}: {}", python(&json!(key)), python(value));
            format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Writes a value as Gemma 4 does. Keys that are not names are in delimiters.
fn gemma(value: &Value) -> String {
    let text = |text: &str| format!("<|\"|>{text}<|\"|>");
    match value {
        Value::String(string) => text(string),
        Value::Array(items) => format!("[{}]", items.iter().map(gemma).collect::<Vec<_>>().join(",")),
        Value::Object(members) => {
            let is_name = |key: &str| !key.is_empty() && key.chars().all(|character| character.is_ascii_alphabetic());
            let key = |key: &str| if is_name(key) { key.to_owned() } else { text(key) };
            let member = |(name, value): (&String, &Value)| format!("{}:{}", key(name), gemma(value));
            format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(","))
        }
        _ => value.to_string(),
    }
}

/// Writes parameters without quotes around text; `parameter` gets a name, a value and whether it is text.
fn untyped(arguments: &Map<String, Value>, parameter: &dyn Fn(&str, &str, bool) -> String) -> String {
    let write = |(name, value): (&String, &Value)| match value {
        Value::String(text) => parameter(name, text, true),
        _ => parameter(name, &value.to_string(), false),
    };
    arguments.iter().map(write).collect()
}

/// Writes calls as the templates of the family do.
pub(crate) fn write(syntax: ToolSyntax, calls: &Calls) -> String {
    let each = |separator: &str, call: &dyn Fn(&str, &Map<String, Value>) -> String| {
        calls.iter().map(|(name, arguments)| call(name, arguments)).collect::<Vec<_>>().join(separator)
    };
    let json = |arguments: &Map<String, Value>| Value::Object(arguments.clone()).to_string();
    match syntax {
        ToolSyntax::Granite20bFc => each("\n", &|name, arguments| {
            format!("<function_call> {{\"name\": \"{name}\", \"arguments\": {}}}", json(arguments))
        }),
        ToolSyntax::LongCat => each("\n", &|name, arguments| {
            let arguments = json(arguments);
            format!("<longcat_tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</longcat_tool_call>")
        }),
        ToolSyntax::OpenAi => each("<|start|>assistant", &|name, arguments| {
            let arguments = json(arguments);
            format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>")
        }),
        ToolSyntax::Gemma4 => each("", &|name, arguments| {
            format!("<|tool_call>call:{name}{}<tool_call|>", gemma(&Value::Object(arguments.clone())))
        }),
        ToolSyntax::Hermes => each("\n", &|name, arguments| {
            format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {}}}\n</tool_call>", json(arguments))
        }),
        ToolSyntax::Llama3Json => {
            each("; ", &|name, arguments| format!("{{\"name\": \"{name}\", \"parameters\": {}}}", json(arguments)))
        }
        ToolSyntax::Mistral => each("", &|name, arguments| format!("[TOOL_CALLS]{name}[ARGS]{}", json(arguments))),
        ToolSyntax::Pythonic | ToolSyntax::Olmo3 => {
            let call = |name: &str, arguments: &Map<String, Value>| {
                let argument = |(name, value): (&String, &Value)| format!("{name}={}", python(value));
                format!("{name}({})", arguments.iter().map(argument).collect::<Vec<_>>().join(", "))
            };
            match syntax {
                ToolSyntax::Olmo3 => format!("<function_calls>\n{}\n</function_calls>", each("\n", &call)),
                _ => format!("[{}]", each(", ", &call)),
            }
        }
        ToolSyntax::Granite | ToolSyntax::Jamba | ToolSyntax::Phi4Mini => {
            let list =
                each(", ", &|name, arguments| format!("{{\"name\": \"{name}\", \"arguments\": {}}}", json(arguments)));
            match syntax {
                ToolSyntax::Granite => format!("<|tool_call|>[{list}]"),
                ToolSyntax::Jamba => format!("<tool_calls>[{list}]</tool_calls>"),
                _ => format!("functools[{list}]"),
            }
        }
        ToolSyntax::KimiK2 => {
            let calls = each("", &|name, arguments| {
                let arguments = json(arguments);
                format!("<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>")
            });
            format!("<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>")
        }
        ToolSyntax::DeepSeekV3 => {
            let calls = each("\n", &|name, arguments| {
                let arguments = json(arguments);
                format!(
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
                )
            });
            format!("<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>")
        }
        ToolSyntax::JsonArray => {
            let list =
                each(", ", &|name, arguments| format!("{{\"name\": \"{name}\", \"parameters\": {}}}", json(arguments)));
            format!("[{list}]")
        }
        _ => write_tags(syntax, calls),
    }
}

/// Writes calls in the syntaxes with tags around untyped values.
fn write_tags(syntax: ToolSyntax, calls: &Calls) -> String {
    let each = |call: &dyn Fn(&str, &Map<String, Value>) -> String| {
        calls.iter().map(|(name, arguments)| call(name, arguments)).collect::<Vec<_>>().join("\n")
    };
    match syntax {
        ToolSyntax::Qwen3Coder | ToolSyntax::SeedOss => each(&|name, arguments| {
            let parameters = untyped(arguments, &|name, value, is_text| {
                let value = match value {
                    "true" if !is_text => "True",
                    "false" if !is_text => "False",
                    "null" if !is_text => "None",
                    _ => value,
                };
                format!("<parameter={name}>\n{value}\n</parameter>\n")
            });
            let tag = if syntax == ToolSyntax::SeedOss { "seed:tool_call" } else { "tool_call" };
            format!("<{tag}>\n<function={name}>\n{parameters}</function>\n</{tag}>")
        }),
        ToolSyntax::MinimaxM2 => {
            let calls = each(&|name, arguments| {
                let parameters =
                    untyped(arguments, &|name, value, _| format!("<parameter name=\"{name}\">{value}</parameter>\n"));
                format!("<invoke name=\"{name}\">\n{parameters}</invoke>")
            });
            format!("<minimax:tool_call>\n{calls}\n</minimax:tool_call>")
        }
        ToolSyntax::DeepSeekV32 => {
            let calls = each(&|name, arguments| {
                let parameters = untyped(arguments, &|name, value, is_text| {
                    format!("<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n")
                });
                format!("<｜DSML｜invoke name=\"{name}\">\n{parameters}</｜DSML｜invoke>")
            });
            format!("<｜DSML｜function_calls>\n{calls}\n</｜DSML｜function_calls>")
        }
        ToolSyntax::Glm => each(&|name, arguments| {
            let parameters = untyped(arguments, &|name, value, _| {
                format!("<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n")
            });
            format!("<tool_call>{name}\n{parameters}</tool_call>")
        }),
        _ => unreachable!("{syntax:?} has no tags"),
    }
}
