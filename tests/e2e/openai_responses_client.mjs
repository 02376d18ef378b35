// Responses with the official package for JavaScript: node --input-type=module - URL KEY MODEL < this.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 300_000 });
const { responses } = client;
const asked = "What is the capital of France?";
const weather = "What is the weather in Paris?";
const body = (fields) => ({ model, input: asked, max_output_tokens: 60, temperature: 0, ...fields });
const refused = (promise) => promise.then(() => assert.fail("not refused"), (error) => error);
const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// Limited, because a small model may not end a text.
const Language = z.object({ name: z.string().max(20), year: z.int().min(1950).max(2025) });
const Place = z.object({ city: z.string().max(20) });
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const tool = { type: "function", name: "get_weather", strict: true, parameters };

const checks = [];
const check = (name, call) => checks.push([name, call]);

check("an answer", async () => {
  const whole = await responses.create(body());
  assert.match(whole.output_text, /Paris/);
  assert.deepEqual([whole.object, whole.status, whole.output[0].role], ["response", "completed", "assistant"]);
  assert.equal(whole.usage.total_tokens, whole.usage.input_tokens + whole.usage.output_tokens);
  assert.ok(whole._request_id);
});

check("a stream is the same", async () => {
  const whole = await responses.create(body());
  let [text, last, count] = ["", null, 0];
  for await (const event of await responses.create(body({ stream: true }))) {
    assert.equal(event.sequence_number, count++);
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  assert.equal(text, whole.output_text);
  assert.deepEqual([last.type, last.response.usage.output_tokens], ["response.completed", whole.usage.output_tokens]);
});

check("the stream helper", async () => {
  const stream = responses.stream(body());
  let [text, snapshot, kinds] = ["", "", new Set()];
  stream.on("event", (event) => kinds.add(event.type));
  stream.on("response.output_text.delta", (event) => { [text, snapshot] = [text + event.delta, event.snapshot]; });
  const final = await stream.finalResponse();
  assert.equal(text, final.output_text);
  assert.equal(snapshot, text);
  assert.ok(kinds.has("response.output_item.done") && kinds.has("response.completed"));
});

check("an abandoned stream", async () => {
  for await (const event of await responses.create(body({ max_output_tokens: 1000, stream: true }))) {
    assert.equal(event.type, "response.created");
    break;
  }
});

check("parse", async () => {
  const fields = body({ input: "Name a language.", text: { format: zodTextFormat(Language, "language") } });
  const answer = await responses.parse(fields);
  assert.deepEqual(Language.parse(answer.output_parsed), JSON.parse(answer.output_text));
  const streamed = await responses.stream(fields).finalResponse();
  assert.deepEqual(streamed.output_parsed, answer.output_parsed);
});

check("an agent's round", async () => {
  const fields = { tools: [tool], parallel_tool_calls: false };
  const input = [{ role: "user", content: weather }];
  const first = await responses.create(body({ ...fields, input, tool_choice: "required" }));
  const [call] = first.output.filter((item) => item.type === "function_call");
  assert.deepEqual(Object.keys(JSON.parse(call.arguments)), ["city"]);
  const result = { type: "function_call_output", call_id: call.call_id, output: "Sunny, 21 °C" };
  const items = [...input, ...first.output, result];
  const second = await responses.create(body({ ...fields, input: items, tool_choice: "none" }));
  assert.ok(second.output_text);
  const chain = { input: [result], previous_response_id: first.id, tool_choice: "none" };
  assert.equal((await responses.create(body({ ...fields, ...chain }))).output_text, second.output_text);
});

check("a named function in a stream", async () => {
  const tools = [zodResponsesFunction({ name: "get_weather", parameters: Place })];
  const tool_choice = { type: "function", name: "get_weather" };
  const fields = body({ input: weather, tools, tool_choice, parallel_tool_calls: false });
  const stream = responses.stream(fields);
  let [deltas, done] = ["", null];
  stream.on("response.function_call_arguments.delta", (event) => { deltas += event.delta; });
  stream.on("response.function_call_arguments.done", (event) => { done = event; });
  const [call] = (await stream.finalResponse()).output;
  assert.equal(deltas, done.arguments);
  assert.equal(call.arguments, deltas);
  const parsed = await responses.parse(fields);
  assert.ok(Place.parse(parsed.output[0].parsed_arguments));
});

check("a chain", async () => {
  const boxes = Array.from({ length: 24 }, (_, n) => `Box number ${n} holds ${n * 7} marbles.`);
  const one = await responses.create(body({ input: boxes.join(" "), max_output_tokens: 24 }));
  const two = await responses.create(body({ input: "How many?", previous_response_id: one.id, max_output_tokens: 24 }));
  assert.ok(two.usage.input_tokens > one.usage.input_tokens);
  assert.ok(two.usage.input_tokens_details.cached_tokens > one.usage.input_tokens / 2);
  assert.equal((await responses.retrieve(two.id)).output_text, two.output_text);
  const items = [];
  for await (const item of responses.inputItems.list(two.id)) items.push(item);
  assert.ok(items.length >= 1);
  await responses.delete(one.id);
  assert.ok((await refused(responses.retrieve(one.id))) instanceof OpenAI.NotFoundError);
  const gone = await refused(responses.create(body({ previous_response_id: one.id })));
  assert.ok(gone instanceof OpenAI.BadRequestError);
  assert.equal(gone.code, "previous_response_not_found");
});

check("the background", async () => {
  let begun = await responses.create(body({ background: true }));
  for (let tries = 0; ["queued", "in_progress"].includes(begun.status) && tries < 1200; tries++) {
    await sleep(100);
    begun = await responses.retrieve(begun.id);
  }
  assert.equal(begun.status, "completed");
  assert.equal((await responses.stream({ response_id: begun.id }).finalResponse()).output_text, begun.output_text);
  const long = await responses.create(body({ background: true, max_output_tokens: 1000, ignore_eos: true }));
  assert.equal((await responses.cancel(long.id)).status, "cancelled");
});

check("conversations and counting", async () => {
  const talk = await client.conversations.create({ items: [{ role: "user", content: "My name is Ann." }] });
  const one = await responses.create(body({ conversation: talk.id, input: "What is my name?" }));
  assert.equal(one.conversation.id, talk.id);
  const roles = [];
  for await (const item of client.conversations.items.list(talk.id, { order: "asc" })) roles.push(item.role);
  assert.deepEqual(roles, ["user", "user", "assistant"]);
  assert.ok((await client.conversations.delete(talk.id)).deleted);
  const plain = await responses.create(body());
  assert.equal((await responses.inputTokens.count({ model, input: asked })).input_tokens, plain.usage.input_tokens);
});

check("errors", async () => {
  const bad = await refused(responses.create(body({ temperature: 3 })));
  assert.ok(bad instanceof OpenAI.BadRequestError);
  assert.deepEqual([bad.status, bad.param, bad.type], [400, "temperature", "invalid_request_error"]);
  const missing = await refused(responses.create(body({ model: "no-such-model", stream: true })));
  assert.equal(missing.code, "model_not_found");
  const raw = await responses.create(body({ no_such_field: 1 })).asResponse();
  assert.equal(raw.headers.get("x-syringa-ignored"), "no_such_field");
});

for (const [name, call] of checks) {
  const error = await call().then(() => null, (reason) => String(reason.stack));
  console.log(JSON.stringify({ name, error }));
}
