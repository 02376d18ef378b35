// Messages with Anthropic's official package for JavaScript: node --input-type=module - URL KEY MODEL < this.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey, maxRetries: 0, timeout: 300_000 });
const asked = [{ role: "user", content: "What is the capital of France?" }];
const body = (fields) => ({ model, messages: asked, max_tokens: 30, temperature: 0, ...fields });
const refused = (fields) => client.messages.create(body(fields)).then(() => assert.fail("not refused"), (error) => error);
const tool = {
  name: "get_weather",
  description: "Return the weather of a city.",
  input_schema: { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] },
};

const checks = [];
const check = (name, call) => checks.push([name, call]);

check("a message", async () => {
  const message = await client.messages.create(body({ system: [{ type: "text", text: "Answer in one sentence." }] }));
  assert.equal(message.type, "message");
  assert.match(message.content[0].text, /Paris/);
  assert.deepEqual([message.stop_reason, message.stop_sequence], ["end_turn", null]);
  assert.ok(message._request_id);
});

check("a stream is the same", async () => {
  const whole = await client.messages.create(body());
  const stream = client.messages.stream(body());
  let text = "";
  stream.on("text", (delta) => { text += delta; });
  const final = await stream.finalMessage();
  assert.equal(text, whole.content[0].text);
  assert.deepEqual(final.content, whole.content);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});

check("events in order", async () => {
  const kinds = [];
  for await (const event of await client.messages.create(body({ stream: true }))) kinds.push(event.type);
  assert.deepEqual(kinds.slice(0, 2), ["message_start", "content_block_start"]);
  assert.deepEqual(kinds.slice(-3), ["content_block_stop", "message_delta", "message_stop"]);
});

check("a tool round trip", async () => {
  const choice = { type: "tool", name: "get_weather" };
  const called = await client.messages.stream(body({ tools: [tool], tool_choice: choice, max_tokens: 60 })).finalMessage();
  assert.equal(called.stop_reason, "tool_use");
  const [call] = called.content;
  assert.equal(typeof call.input.city, "string");
  const results = [{ type: "tool_result", tool_use_id: call.id, content: "Sunny, 21 degrees." }];
  const messages = [...asked, { role: "assistant", content: called.content }, { role: "user", content: results }];
  const answer = await client.messages.create(body({ messages, tools: [tool], tool_choice: { type: "none" } }));
  assert.equal(answer.content[0].type, "text");
});

check("counts", async () => {
  const fields = { model, messages: asked, tools: [tool] };
  const { input_tokens } = await client.messages.countTokens(fields);
  const { usage } = await client.messages.create({ ...fields, max_tokens: 1 });
  const total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
  assert.equal(input_tokens, total);
});

check("stop sequences and the last message of the assistant", async () => {
  const stopped = await client.messages.create(body({ stop_sequences: ["Paris"] }));
  assert.deepEqual([stopped.stop_reason, stopped.stop_sequence], ["stop_sequence", "Paris"]);
  const messages = [...asked, { role: "assistant", content: "The capital of France is" }];
  assert.match((await client.messages.create(body({ messages }))).content[0].text, /Paris/);
});

check("beta messages and models", async () => {
  assert.match((await client.beta.messages.create(body())).content[0].text, /Paris/);
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  assert.ok(ids.includes(model));
});

check("errors", async () => {
  const missing = await refused({ model: "none" });
  assert.ok(missing instanceof Anthropic.NotFoundError);
  assert.equal(missing.error.error.type, "not_found_error");
  assert.ok((await refused({ temperature: 3 })) instanceof Anthropic.BadRequestError);
  const other = client.withOptions({ apiKey: "wrong" });
  const denied = await other.messages.create(body()).then(() => assert.fail("not refused"), (error) => error);
  assert.ok(denied instanceof Anthropic.AuthenticationError);
});

for (const [name, call] of checks) {
  const error = await call().then(() => null, (reason) => String(reason.stack));
  console.log(JSON.stringify({ name, error }));
}
