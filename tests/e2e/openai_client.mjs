// The checks of `test_openai_javascript.py`: node --input-type=module - URL KEY MODEL < this.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 300_000 });
const body = { model, prompt: "The capital of France is", max_tokens: 12, temperature: 0 };

// plain
const whole = await client.completions.create(body);
assert.match(whole.choices[0].text, /Paris/);
assert.equal(whole.choices[0].finish_reason, "length");
assert.deepEqual([whole.usage.prompt_tokens, whole.usage.completion_tokens], [5, 12]);

// streamed, with usage at the end
let text = "";
let usage = null;
let chunks = 0;
const stream = await client.completions.create({ ...body, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  chunks += 1;
  text += chunk.choices[0]?.text ?? "";
  usage = chunk.usage;
}
assert.equal(text, whole.choices[0].text);
assert.deepEqual(usage.completion_tokens, 12);
assert.ok(chunks > 6);

// an abandoned stream
for await (const chunk of await client.completions.create({ ...body, max_tokens: 1000, stream: true })) {
  assert.equal(chunk.object, "text_completion");
  break;
}

// errors
const refused = async (fields) => client.completions.create({ ...body, ...fields }).then(() => null, (error) => error);
const bad = await refused({ temperature: 3 });
assert.ok(bad instanceof OpenAI.BadRequestError);
assert.deepEqual([bad.status, bad.param, bad.type], [400, "temperature", "invalid_request_error"]);
const missing = await refused({ model: "no-such-model", stream: true });
assert.ok(missing instanceof OpenAI.NotFoundError);
assert.equal(missing.code, "model_not_found");
const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);

// models
const models = [];
for await (const each of client.models.list()) models.push(each.id);
assert.deepEqual(models, [model]);

console.log("all is well");
