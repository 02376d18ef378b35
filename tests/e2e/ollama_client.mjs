// The official `ollama` package for JavaScript: node --input-type=module - URL KEY MODEL < this.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const [host, key, model] = process.argv.slice(2);
const client = new Ollama({ host, headers: { Authorization: `Bearer ${key}` } });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const options = { temperature: 0, num_predict: 60 };
const body = (fields) => ({ model, messages, options, ...fields });
const refused = (call) => call.then(() => assert.fail("not refused"), (error) => error);

const checks = [];
const check = (name, call) => checks.push([name, call]);

check("an answer", async () => {
  const answer = await client.chat(body());
  assert.match(answer.message.content, /Paris/);
  assert.deepEqual([answer.model, answer.done, answer.done_reason], [model, true, "stop"]);
  assert.ok(answer.eval_count > 0 && answer.eval_duration > 0 && answer.prompt_eval_count > 10);
});

check("a stream is the same", async () => {
  const whole = await client.chat(body());
  let [text, last] = ["", null];
  for await (const part of await client.chat(body({ stream: true }))) {
    text += part.message.content;
    last = part;
  }
  assert.equal(text, whole.message.content);
  assert.deepEqual([last.done, last.eval_count], [true, whole.eval_count]);
});

check("a stream that is aborted", async () => {
  const stream = await client.chat(body({ stream: true, options: { num_predict: 1000, temperature: 0 } }));
  let parts = 0;
  const error = await refused((async () => {
    for await (const part of stream) {
      parts += 1;
      stream.abort();
    }
  })());
  assert.equal(error.name, "AbortError");
  assert.ok(parts >= 1);
});

check("generate", async () => {
  const whole = await client.generate({ model, prompt: messages[0].content, options });
  assert.ok(whole.response && whole.context.length > 0);
  let text = "";
  for await (const part of await client.generate({ model, prompt: messages[0].content, options, stream: true })) {
    text += part.response;
  }
  assert.equal(text, whole.response);
});

check("structured output", async () => {
  const format = {
    type: "object",
    properties: { name: { type: "string", maxLength: 20 }, year: { type: "integer", minimum: 1950, maximum: 2025 } },
    required: ["name", "year"],
  };
  const answer = await client.chat(body({ format, options: { temperature: 0 } }));
  assert.deepEqual(Object.keys(JSON.parse(answer.message.content)).sort(), ["name", "year"]);
});

check("models", async () => {
  const { models } = await client.list();
  assert.ok(models.some((each) => each.name === `${model}:latest`));
  const shown = await client.show({ model });
  assert.equal(shown.details.family, "llama");
  assert.ok((await client.ps()).models.length > 0);
  assert.ok((await client.version()).version);
});

check("a model that is created, copied and deleted", async () => {
  const lines = [];
  for await (const line of await client.create({ model: "botanist", from: model, system: "You are a botanist.", stream: true })) {
    lines.push(line.status);
  }
  assert.equal(lines.at(-1), "success");
  assert.equal((await client.show({ model: "botanist" })).system, "You are a botanist.");
  await client.copy({ source: "botanist", destination: "gardener" });
  await client.delete({ model: "botanist" });
  await client.delete({ model: "gardener" });
  assert.match((await refused(client.show({ model: "gardener" }))).message, /not found/);
});

check("pull", async () => {
  const lines = [];
  for await (const line of await client.pull({ model: "smollm2", stream: true })) lines.push(line.status);
  assert.equal(lines.at(-1), "success");
});

check("errors", async () => {
  assert.match((await refused(client.chat(body({ model: "none" })))).message, /model 'none' not found/);
  assert.match((await refused(client.chat(body({ options: { top_k: "x" } })))).message, /options.top_k/);
});

for (const [name, call] of checks) {
  const error = await call().then(() => null, (failure) => failure.stack ?? String(failure));
  console.log(JSON.stringify({ name, error }));
}
