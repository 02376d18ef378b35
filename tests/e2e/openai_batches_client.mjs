// Files and batches with the official package for JavaScript: node --input-type=module - URL KEY MODEL < this.
import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";
import OpenAI, { toFile } from "openai";

const [url, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 300_000 });
const endpoint = "/v1/completions";
const line = (custom_id, body) =>
  JSON.stringify({
    custom_id,
    method: "POST",
    url: endpoint,
    body: { model, prompt: custom_id, max_tokens: 4, seed: 1, ...body },
  });
const upload = async (lines, fields) =>
  client.files.create({ file: await toFile(Buffer.from(lines.join("\n")), "in.jsonl"), purpose: "batch", ...fields });
const create = (file) =>
  client.batches.create({ input_file_id: file.id, endpoint, completion_window: "24h", metadata: { a: "b" } });
const finished = async (id) => {
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    await sleep(100);
  }
};
const contentOf = async (id) => (await (await client.files.content(id)).text()).trimEnd().split("\n").map(JSON.parse);

const checks = [];
const check = (name, call) => checks.push([name, call]);

check("a batch", async () => {
  const file = await upload([line("one"), line("hot", { temperature: 9 }), line("two")]);
  const batch = await create(file);
  assert.deepEqual([batch.object, batch.status, batch.metadata], ["batch", "validating", { a: "b" }]);
  const done = await finished(batch.id);
  assert.equal(done.status, "completed");
  assert.deepEqual(done.request_counts, { total: 3, completed: 2, failed: 1 });
  const output = await contentOf(done.output_file_id);
  assert.deepEqual(output.map((each) => each.custom_id), ["one", "two"]);
  const direct = await client.completions.create({ model, prompt: "one", max_tokens: 4, seed: 1 });
  assert.equal(output[0].response.body.choices[0].text, direct.choices[0].text);
  const [refused] = await contentOf(done.error_file_id);
  assert.deepEqual([refused.custom_id, refused.response.status_code, refused.error], ["hot", 400, null]);
  const listed = [];
  for await (const each of client.batches.list({ limit: 1 })) listed.push(each.id);
  assert.ok(listed.includes(batch.id));
});

check("files", async () => {
  const file = await upload(["{}"], { expires_after: { anchor: "created_at", seconds: 3600 } });
  assert.equal(file.expires_at, file.created_at + 3600);
  assert.deepEqual(await client.files.retrieve(file.id), file);
  const listed = [];
  for await (const each of client.files.list({ limit: 1, purpose: "batch" })) listed.push(each.id);
  assert.ok(listed.includes(file.id));
  assert.equal((await client.files.delete(file.id)).deleted, true);
  const missing = await client.files.retrieve(file.id).then(() => null, (error) => error);
  assert.ok(missing instanceof OpenAI.NotFoundError);
});

check("a failed batch", async () => {
  const done = await finished((await create(await upload(["nonsense"]))).id);
  assert.equal(done.status, "failed");
  assert.deepEqual([done.errors.data[0].code, done.errors.data[0].line], ["invalid_json_line", 1]);
});

for (const [name, call] of checks) {
  const error = await call().then(() => null, (reason) => String(reason?.stack ?? reason));
  console.log(JSON.stringify({ name, error }));
}
