// The OpenAI SDK for Node, unchanged.
"use strict";

const assert = require("node:assert/strict");
const { test } = require("node:test");
const OpenAI = require("openai");

const client = new OpenAI({ baseURL: `${process.env.OCTAVO_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Well?" }];
const ask = { model: "tiny", messages, max_tokens: 12, temperature: 0 };

const schema = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, alarm: { type: "boolean" } },
  required: ["city", "alarm"],
  additionalProperties: false,
};
const format = { type: "json_schema", json_schema: { name: "forecast", strict: true, schema } };
const tool = { type: "function", function: { name: "forecast", parameters: schema } };

test("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.deepEqual(ids, ["tiny"]);
  assert.equal((await client.models.retrieve("tiny")).id, "tiny");
  await assert.rejects(client.models.retrieve("nope"), OpenAI.NotFoundError);
});

test("a stream says what one answer says", async () => {
  const whole = await client.chat.completions.create(ask);
  const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.total_tokens, whole.usage.total_tokens);
  const helper = client.chat.completions.stream(ask);
  assert.equal(await helper.finalContent(), text);
});

test("schemas", async () => {
  const whole = await client.chat.completions.parse({ ...ask, max_tokens: 100, response_format: format });
  assert.ok(["Paris", "Rome"].includes(JSON.parse(whole.choices[0].message.content).city));
  const response = await client.responses.create({
    model: "tiny", input: "Well?", max_output_tokens: 100, text: { format: { type: "json_schema", name: "forecast", schema } },
  });
  assert.equal(typeof JSON.parse(response.output_text).alarm, "boolean");
});

test("calls", async () => {
  const asked = { ...ask, max_tokens: 100, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
  const { message } = (await client.chat.completions.create(asked)).choices[0];
  const streamed = await client.chat.completions.stream(asked).finalMessage();
  assert.deepEqual(streamed.tool_calls.map((call) => call.function), message.tool_calls.map((call) => call.function));
  // The SDK calls the function itself and sends what it returned.
  const called = [];
  const run = { ...tool.function, parse: JSON.parse, function: (given) => (called.push(given), "sunny") };
  const runner = client.chat.completions.runTools(
    { ...asked, tools: [{ type: "function", function: run }] },
    { maxChatCompletions: 1 },
  );
  await runner.done();
  assert.deepEqual(called, [JSON.parse(message.tool_calls[0].function.arguments)]);
});

test("responses", async () => {
  const asked = { model: "tiny", input: "Well?", max_output_tokens: 12, temperature: 0 };
  const whole = await client.responses.create(asked);
  const stream = client.responses.stream(asked);
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  assert.equal(text, whole.output_text);
  assert.equal((await stream.finalResponse()).output_text, text);
});

test("completions and embeddings", async () => {
  const answer = await client.completions.create({ model: "tiny", prompt: ["a", "b"], n: 2, max_tokens: 3 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
  const { data } = await client.embeddings.create({ model: "tiny", input: ["sea", "land"] });
  for (const { embedding } of data) {
    assert.ok(Math.abs(embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-4);
  }
});

test("errors are the classes a client expects", async () => {
  const rejects = (change, error) => assert.rejects(client.chat.completions.create({ ...ask, ...change }), error);
  await rejects({ model: "nope" }, OpenAI.NotFoundError);
  await rejects({ temperature: 5 }, OpenAI.BadRequestError);
  await rejects({ messages: [{ role: "user", content: "word ".repeat(500) }] }, OpenAI.BadRequestError);
});

test("an answer is given up", async () => {
  const stream = await client.chat.completions.create({ ...ask, max_tokens: 200, stream: true });
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta.content) break;
  }
  const controller = new AbortController();
  const pending = client.chat.completions.create(ask, { signal: controller.signal });
  controller.abort();
  await assert.rejects(pending, OpenAI.APIUserAbortError);
  assert.ok((await client.chat.completions.create(ask)).choices.length);
});
