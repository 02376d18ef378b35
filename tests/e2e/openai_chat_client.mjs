// Chat with the official package for JavaScript: node --input-type=module - URL KEY MODEL < this.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 300_000 });
const { completions } = client.chat;
const asked = [{ role: "user", content: "What is the capital of France?" }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const body = (fields) => ({ model, messages: asked, max_completion_tokens: 60, temperature: 0, ...fields });
const refused = (fields) => completions.create(body(fields)).then(() => assert.fail("not refused"), (error) => error);

// Limited, because a small model may not end a text.
const Language = z.object({ name: z.string().max(20), year: z.int().min(1950).max(2025) });
const Place = z.object({ city: z.string().max(20) });
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", strict: true, parameters } };

const checks = [];
const check = (name, call) => checks.push([name, call]);

check("an answer", async () => {
  const whole = await completions.create(body());
  assert.match(whole.choices[0].message.content, /Paris/);
  assert.equal(whole.choices[0].finish_reason, "stop");
  assert.deepEqual(whole.choices[0].message.tool_calls, []);
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  assert.ok(whole._request_id);
});

check("a stream is the same", async () => {
  const whole = await completions.create(body());
  let [text, last] = ["", null];
  for await (const chunk of await completions.create(body({ stream: true, stream_options: { include_usage: true } }))) {
    text += chunk.choices[0]?.delta.content ?? "";
    last = chunk;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual([last.choices, last.usage.completion_tokens], [[], whole.usage.completion_tokens]);
});

check("the stream helper", async () => {
  const stream = completions.stream(body({ logprobs: true, top_logprobs: 2, stream_options: { include_usage: true } }));
  let [text, snapshot] = ["", ""];
  stream.on("content", (delta, sofar) => { [text, snapshot] = [text + delta, sofar]; });
  const final = await stream.finalChatCompletion();
  assert.equal(text, final.choices[0].message.content);
  assert.equal(snapshot, text);
  assert.equal(final.choices[0].logprobs.content[0].top_logprobs.length, 2);
  assert.equal((await stream.totalUsage()).completion_tokens, final.usage.completion_tokens);
});

check("several choices, seeds, stop strings and lengths", async () => {
  const draw = async () => (await completions.create(body({ n: 2, seed: 5, temperature: 1.2 }))).choices;
  const [first, again] = [await draw(), await draw()];
  assert.equal(first.length, 2);
  assert.deepEqual(first.map((each) => each.message.content), again.map((each) => each.message.content));
  const stopped = await completions.create(body({ stop: "Paris" }));
  assert.doesNotMatch(stopped.choices[0].message.content, /Paris/);
  const cut = await completions.create(body({ max_completion_tokens: 3 }));
  assert.deepEqual([cut.choices[0].finish_reason, cut.usage.completion_tokens], ["length", 3]);
});

check("an abandoned stream", async () => {
  for await (const chunk of await completions.create(body({ max_completion_tokens: 1000, stream: true }))) {
    assert.equal(chunk.object, "chat.completion.chunk");
    break;
  }
});

check("an agent's round", async () => {
  const options = { messages: weather, tools: [tool], parallel_tool_calls: false };
  const first = (await completions.create(body({ ...options, tool_choice: "required" }))).choices[0];
  assert.equal(first.finish_reason, "tool_calls");
  const [call] = first.message.tool_calls;
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
  const result = { role: "tool", tool_call_id: call.id, content: "Sunny, 21 °C" };
  const messages = [...weather, first.message, result];
  const second = (await completions.create(body({ ...options, messages, tool_choice: "none" }))).choices[0];
  assert.ok(second.message.content);
});

check("a named function in a stream", async () => {
  const tools = [zodFunction({ name: "get_weather", parameters: Place })];
  const tool_choice = { type: "function", function: { name: "get_weather" } };
  const stream = completions.stream(body({ messages: weather, tools, tool_choice }));
  let [deltas, done] = ["", null];
  stream.on("tool_calls.function.arguments.delta", (event) => { deltas += event.arguments_delta; });
  stream.on("tool_calls.function.arguments.done", (event) => { done = event; });
  const [call] = (await stream.finalMessage()).tool_calls;
  assert.equal(deltas, done.arguments);
  assert.equal(call.function.arguments, deltas);
  assert.ok(Place.parse(call.function.parsed_arguments));
});

check("runTools", async () => {
  for (const stream of [false, true]) {
    const places = [];
    const callee = {
      parse: (text) => Place.parse(JSON.parse(text)),
      function: ({ city }) => { places.push(city); return "Sunny"; },
    };
    const runnable = { type: "function", function: { ...tool.function, ...callee } };
    const fields = { messages: weather, tools: [runnable], parallel_tool_calls: false, tool_choice: "required" };
    // A model that must call never stops calling: two rounds are enough.
    const runner = completions.runTools(body({ ...fields, stream }), { maxChatCompletions: 2 });
    await runner.done();
    assert.equal(places.length, 2);
    const kinds = runner.messages.map((message) => message.role);
    assert.deepEqual(kinds, ["user", "assistant", "tool", "assistant", "tool"]);
  }
});

check("parse", async () => {
  const response_format = zodResponseFormat(Language, "language");
  const messages = [{ role: "user", content: "Name a programming language and its year." }];
  const answer = await completions.parse(body({ messages, response_format }));
  assert.deepEqual(Language.parse(answer.choices[0].message.parsed), answer.choices[0].message.parsed);
  const streamed = await completions.stream(body({ messages, response_format })).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, answer.choices[0].message.parsed);
  await assert.rejects(completions.parse(body({ response_format, max_completion_tokens: 3 })), OpenAI.LengthFinishReasonError);
});

check("errors", async () => {
  const bad = await refused({ temperature: 3 });
  assert.ok(bad instanceof OpenAI.BadRequestError);
  assert.deepEqual([bad.status, bad.param, bad.type], [400, "temperature", "invalid_request_error"]);
  const missing = await refused({ model: "no-such-model", stream: true });
  assert.ok(missing instanceof OpenAI.NotFoundError);
  assert.equal(missing.code, "model_not_found");
  const image = { type: "image_url", image_url: { url: "https://example.com/image.jpg" } };
  assert.equal((await refused({ messages: [{ role: "user", content: [image] }] })).param, "messages[0].content[0]");
  const raw = await completions.create({ ...body(), no_such_field: 1 }).asResponse();
  assert.equal(raw.headers.get("x-syringa-ignored"), "no_such_field");
});

for (const [name, call] of checks) {
  const error = await call().then(() => null, (reason) => String(reason.stack));
  console.log(JSON.stringify({ name, error }));
}
