// Chat with Vercel's AI SDK: node --input-type=module - URL KEY MODEL < this.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url, apiKey, model] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "syringa",
  baseURL: `${url}/v1`,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = "What is the capital of France?";
const weather = "What is the weather in Paris?";
const body = (fields) => ({
  model: provider(model),
  prompt: asked,
  temperature: 0,
  maxOutputTokens: 100,
  maxRetries: 0,
  ...fields,
});
globalThis.AI_SDK_LOG_WARNINGS = false;

// Limited, because a small model may not end a text.
const Language = z.object({
  name: z.string().max(20),
  year: z.int().min(1950).max(2025),
  kind: z.enum(["compiled", "interpreted"]),
  users: z.array(z.object({ name: z.string().max(12) })).max(2),
});
const getWeather = (places) => tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async ({ city }) => { places.push(city); return { city, sky: "sunny" }; },
});
// The model must call in its first step, and must not in the next.
const steered = { prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }) };

const checks = [];
const check = (name, call) => checks.push([name, call]);

check("generateText", async () => {
  const answer = await generateText(body({ system: "Answer in one sentence." }));
  assert.match(answer.text, /Paris/);
  assert.equal(answer.finishReason, "stop");
  assert.ok(answer.usage.inputTokens > 0);
  assert.equal(answer.usage.totalTokens, answer.usage.inputTokens + answer.usage.outputTokens);
  assert.deepEqual(answer.toolCalls, []);
});

check("streamText", async () => {
  const whole = await generateText(body());
  const stream = streamText(body());
  const parts = [];
  for await (const part of stream.textStream) parts.push(part);
  assert.ok(parts.length > 3);
  assert.equal(parts.join(""), whole.text);
  assert.equal(await stream.finishReason, "stop");
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
});

check("seeds, stop strings and lengths", async () => {
  const draw = async () => (await generateText(body({ temperature: 1.2, seed: 5, maxOutputTokens: 30 }))).text;
  assert.equal(await draw(), await draw());
  assert.doesNotMatch((await generateText(body({ stopSequences: ["Paris"] }))).text, /Paris/);
  assert.equal((await generateText(body({ maxOutputTokens: 3 }))).finishReason, "length");
});

check("generateObject", async () => {
  const { object, usage } = await generateObject(body({ schema: Language, prompt: "A programming language." }));
  assert.deepEqual(Language.parse(object), object);
  assert.ok(usage.outputTokens > 0);
});

check("streamObject", async () => {
  const stream = streamObject(body({ schema: Language, prompt: "A programming language." }));
  let partials = 0;
  for await (const _ of stream.partialObjectStream) partials += 1;
  assert.ok(partials > 3);
  assert.ok(Language.parse(await stream.object));
});

check("Output.object", async () => {
  const output = Output.object({ schema: Language });
  const answer = await generateText(body({ output, prompt: "A programming language." }));
  assert.deepEqual(Language.parse(answer.output), answer.output);
});

check("tools", async () => {
  const places = [];
  const tools = { getWeather: getWeather(places) };
  const answer = await generateText(body({ prompt: weather, tools, stopWhen: stepCountIs(2), ...steered }));
  assert.ok(places.length >= 1);
  assert.equal(answer.steps.length, 2);
  assert.equal(answer.steps[0].finishReason, "tool-calls");
  assert.equal(answer.steps[0].toolResults[0].output.sky, "sunny");
  assert.ok(answer.text);
  const tokens = answer.steps.map((step) => step.usage.outputTokens);
  assert.equal(answer.totalUsage.outputTokens, tokens[0] + tokens[1]);
});

check("tools in a stream", async () => {
  const places = [];
  const tools = { getWeather: getWeather(places) };
  const stream = streamText(body({ prompt: weather, tools, stopWhen: stepCountIs(2), ...steered }));
  const kinds = new Set();
  for await (const part of stream.fullStream) {
    assert.notEqual(part.type, "error", String(part.error));
    kinds.add(part.type);
  }
  for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result", "text-delta", "finish"]) {
    assert.ok(kinds.has(kind), `${kind} is not among ${[...kinds]}`);
  }
  assert.ok(places.length >= 1);
});

check("a named tool", async () => {
  const places = [];
  const tools = { getWeather: getWeather(places), other: getWeather([]) };
  const toolChoice = { type: "tool", toolName: "getWeather" };
  const answer = await generateText(body({ prompt: weather, tools, toolChoice }));
  assert.equal(answer.toolCalls.length, 1);
  assert.deepEqual([answer.toolCalls[0].toolName, places.length], ["getWeather", 1]);
});

check("errors", async () => {
  const image = { type: "image", image: new Uint8Array([0x89, 0x50, 0x4e, 0x47]), mediaType: "image/png" };
  const messages = [{ role: "user", content: [image] }];
  const error = await generateText(body({ prompt: undefined, messages })).then(() => null, (raised) => raised);
  assert.ok(APICallError.isInstance(error), String(error));
  assert.deepEqual([error.statusCode, error.isRetryable], [400, false]);
  assert.equal(error.data.error.param, "messages[0].content[0]");
});

for (const [name, call] of checks) {
  const error = await call().then(() => null, (reason) => String(reason.stack));
  console.log(JSON.stringify({ name, error }));
}
