//! Requests to the server and its answers.

import { imageUrl } from "./image-store.js";
import { Problem } from "./problem.js";
import { SAMPLING, settings, tab } from "./store.js";

const at = (path) => new URL(path, document.baseURI);

/** The callback for a missing or wrong key. It receives a sentence. */
let onRefused = () => {};
export const whenRefused = (callback) => (onRefused = callback);

/** Yields the data of each server-sent event of a body, however its bytes are cut. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [], cut = false;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    // A line may end with CR LF whose halves came apart; the second ends nothing.
    const lines = (rest + (cut ? value.replace(/^\n/, "") : value)).split(/\r\n|\n|\r/);
    cut = value.endsWith("\r");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (data.length) yield data.join("\n");
        data = [];
      } else if (/^data(:|$)/.test(line)) {
        data.push(line.slice(5).replace(/^ /, ""));
      }
    }
  }
}

/** The message of an error body, as a sentence. */
function sentence(text, status) {
  let said;
  try {
    const { error, detail, message } = JSON.parse(text);
    said = error?.message ?? error ?? detail ?? message ?? text;
    if (typeof said !== "string") said = JSON.stringify(said);
  } catch { // Not JSON: a proxy's page, perhaps.
    said = text.slice(0, 5000).replace(/<[^>]*>/g, " ");
  }
  said = said.trim().slice(0, 600);
  return status ? `The server answered ${status}${said ? `: ${said}` : "."}` : said;
}

/** Sends a request. Throws a Problem unless it succeeds. */
async function ask(path, options = {}) {
  const { key } = tab;
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch(at(path), { ...options, headers: { ...headers, ...options.headers }, credentials: "same-origin" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Problem("The server cannot be reached.");
  }
  if (response.ok) return response;
  const problem = new Problem(sentence(await response.text(), response.status));
  if (response.status === 401) {
    // The key that was refused is no longer the one in use: the answer was on its way while another was typed.
    if (tab.key !== key) return ask(path, options);
    problem.message = tab.key ? "The server does not take this API key." : "The server asks for an API key.";
    onRefused(problem.message);
  }
  throw problem;
}

/** The names under which the model is served. */
export const modelNames = async () => (await (await ask("v1/models")).json()).data.map((model) => model.id);

/** The sampling defaults of the model, null if the server does not report them, and the most images of a prompt. */
export async function modelInfo() {
  try {
    const { sampling_defaults: defaults, limit_mm_per_prompt: limits } = (await (await ask("server_info?config_format=json")).json()).vllm_config;
    return { defaults: defaults ?? null, images: limits?.image ?? 0 };
  } catch {
    return { defaults: null, images: 0 }; // Only placeholders and the button for images depend on them.
  }
}

/** Whether the description of the API is served. */
export async function hasDocs() {
  try {
    return (await fetch(at("docs"), { method: "HEAD" })).ok;
  } catch {
    return false;
  }
}

/** The content of a question: its images in front of its text, or the text alone. */
async function content({ user, images = [] }) {
  if (!images.length) return user;
  const part = async (image) => {
    const url = await imageUrl(image);
    if (!url) throw new Problem(`The image “${image.name}” is not in this browser. Edit its message to remove it or to add it again.`);
    return { type: "image_url", image_url: { url } };
  };
  const parts = await Promise.all(images.map(part));
  return user.trim() ? [...parts, { type: "text", text: user }] : parts;
}

/** The messages of a request: the earlier turns that have an answer, then the question of the last turn. */
async function messages(turns) {
  const list = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns.slice(0, -1).filter((turn) => turn.content)) {
    list.push({ role: "user", content: await content(turn) }, { role: "assistant", content: turn.content });
  }
  return [...list, { role: "user", content: await content(turns.at(-1)) }];
}

/** The body of a request for the answer to the last of `turns`. It leaves out every setting that the user did not set. */
async function requestBody(turns) {
  const body = { messages: await messages(turns), stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if (settings.model) body.model = settings.model;
  for (const name of SAMPLING) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  return body;
}

/** Streams the answer to the last of `turns` into that turn, and calls `onUpdate` after each part. */
export async function answer(turns, signal, onUpdate) {
  const turn = turns.at(-1);
  const body = JSON.stringify(await requestBody(turns));
  const clock = { start: performance.now(), first: 0, last: 0, tokens: 0 };
  const init = { method: "POST", headers: { "Content-Type": "application/json" }, body, signal };
  const response = await ask("v1/chat/completions", init);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new Problem("The server sent an event that is not JSON.");
    }
    if (chunk.error) throw new Problem(sentence(data));
    if (take(turn, chunk.choices?.[0])) clock.first ||= clock.last = performance.now();
    if (chunk.usage) {
      if (chunk.usage.completion_tokens > clock.tokens) clock.last = performance.now();
      clock.tokens = chunk.usage.completion_tokens;
    }
    turn.stats = stats(clock);
    onUpdate();
  }
  throw new Problem("The connection ended before the answer did.");
}

/** Adds a choice's delta to a turn. Says whether it held anything that was generated. */
function take(turn, choice) {
  if (!choice) return false;
  const { content, reasoning, tool_calls: calls = [] } = choice.delta ?? {};
  turn.content += content ?? "";
  turn.reasoning += reasoning ?? "";
  for (const { index = 0, function: f } of calls ?? []) {
    const call = (turn.calls[index] ??= { name: "", arguments: "" });
    call.name += f?.name ?? "";
    call.arguments += f?.arguments ?? "";
  }
  if (choice.finish_reason === "length") turn.note = "Cut off at the limit of tokens.";
  if (choice.finish_reason === "abort") turn.note = "The server ended this answer.";
  return Boolean(content || reasoning || calls?.length);
}

/** "12 tokens · 8.1 tokens/s · first after 0.35 s" */
function stats({ start, first, last, tokens }) {
  const parts = [];
  if (tokens) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (tokens > 1 && last > first) parts.push(`${(((tokens - 1) * 1000) / (last - first)).toFixed(1)} tokens/s`);
  if (first) parts.push(`first after ${((first - start) / 1000).toFixed(2)} s`);
  return parts.join(" · ");
}
