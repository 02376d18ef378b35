// The AI SDK with its provider for OpenAI, on responses and chat: node --input-type=module - URL KEY MODEL < this.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, apiKey, model] = process.argv.slice(2);
const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const models = [provider.responses(model), provider.chat(model)];
const asked = "What is the capital of France?";
const weather = "What is the weather in Paris?";
const body = (fields) => ({ prompt: asked, temperature: 0, maxOutputTokens: 100, maxRetries: 0, ...fields });
globalThis.AI_SDK_LOG_WARNINGS = false;

// Limited, because a small model may not end a text.
const Language = z.object({ name: z.string().max(20), year: z.int().min(1950).max(2025) });
const getWeather = (places) => tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async ({ city }) => { places.push(city); return { city, sky: "sunny" }; },
});
// The model must call in its first step, and must not in the next.
const steered = {
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  providerOptions: { openai: { parallelToolCalls: false } },
};

const checks = [];
const check = (name, call) => checks.push([name, call]);

check("generateText", async () => {
  for (const each of models) {
    const answer = await generateText(body({ model: each, system: "Answer in one sentence." }));
    assert.match(answer.text, /Paris/);
    assert.equal(answer.finishReason, "stop");
    assert.equal(answer.usage.totalTokens, answer.usage.inputTokens + answer.usage.outputTokens);
  }
});

check("streamText", async () => {
  for (const each of models) {
    const whole = await generateText(body({ model: each }));
    const stream = streamText(body({ model: each }));
    const parts = [];
    for await (const part of stream.textStream) parts.push(part);
    assert.ok(parts.length > 3);
    assert.equal(parts.join(""), whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  }
});

check("Output.object", async () => {
  for (const each of models) {
    const output = Output.object({ schema: Language });
    const answer = await generateText(body({ model: each, output, prompt: "A programming language." }));
    assert.deepEqual(Language.parse(answer.output), answer.output);
  }
});

check("tools", async () => {
  for (const each of models) {
    const places = [];
    const tools = { getWeather: getWeather(places) };
    const answer = await generateText(body({ model: each, prompt: weather, tools, ...steered }));
    assert.equal(places.length, 1);
    assert.equal(answer.steps.length, 2);
    assert.equal(answer.steps[0].toolResults[0].output.sky, "sunny");
    assert.ok(answer.text);
  }
});

check("tools in a stream", async () => {
  for (const each of models) {
    const places = [];
    const tools = { getWeather: getWeather(places) };
    const kinds = new Set();
    const stream = streamText(body({ model: each, prompt: weather, tools, ...steered }));
    for await (const part of stream.fullStream) {
      assert.notEqual(part.type, "error", String(part.error));
      kinds.add(part.type);
    }
    for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result", "text-delta", "finish"]) {
      assert.ok(kinds.has(kind), `${kind} is not among ${[...kinds]}`);
    }
    assert.equal(places.length, 1);
  }
});

check("a stored response is continued", async () => {
  const [responses] = models;
  const first = await generateText(body({ model: responses, prompt: "My name is Ann." }));
  const previousResponseId = first.providerMetadata.openai.responseId;
  const providerOptions = { openai: { previousResponseId } };
  const second = await generateText(body({ model: responses, prompt: "What is my name?", providerOptions }));
  assert.ok(second.text);
  assert.ok(second.usage.inputTokens > first.usage.inputTokens);
});

check("errors", async () => {
  for (const each of [provider.responses("none"), provider.chat("none")]) {
    const error = await generateText(body({ model: each })).then(() => null, (raised) => raised);
    assert.ok(APICallError.isInstance(error), String(error));
    assert.deepEqual([error.statusCode, error.data.error.code], [404, "model_not_found"]);
  }
});

for (const [name, call] of checks) {
  const error = await call().then(() => null, (reason) => String(reason.stack));
  console.log(JSON.stringify({ name, error }));
}
