// The same calls as in test_batch_sdks.py, by OpenAI's Node SDK. Usage: node sdk_batches.mjs ADDRESS FOLDER
import assert from "node:assert";
import fs from "node:fs";
import OpenAI from "openai";

const [url, folder] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "mine", maxRetries: 0 });
const endpoint = "/v1/chat/completions", completion_window = "24h";

const upload = (name) => client.files.create({ file: fs.createReadStream(`${folder}/${name}`), purpose: "batch" });
const create = (file, more = {}) => client.batches.create({ input_file_id: file.id, endpoint, completion_window, ...more });
const until = async (batch, ...states) => {
  while (!states.includes(batch.status)) {
    await new Promise((done) => setTimeout(done, 20));
    batch = await client.batches.retrieve(batch.id);
  }
  return batch;
};
const all = async (page) => { const found = []; for await (const one of page) found.push(one); return found; };
const status = async (promise) => { try { await promise; } catch (error) { return error.status; } };

const file = await upload("good.jsonl");
assert.strictEqual((await client.files.retrieve(file.id)).filename, "good.jsonl");
assert.strictEqual(await (await client.files.content(file.id)).text(), fs.readFileSync(`${folder}/good.jsonl`, "utf8"));
const done = await until(await create(file, { metadata: { team: "a" } }), "completed");
assert.deepStrictEqual(done.request_counts, { total: 3, completed: 2, failed: 1 });
assert.strictEqual(done.metadata.team, "a");
assert.strictEqual((await (await client.files.content(done.output_file_id)).text()).trim().split("\n").length, 2);
assert.strictEqual(JSON.parse(await (await client.files.content(done.error_file_id)).text()).custom_id, "wrong");

const bad = await until(await create(await upload("bad.jsonl")), "failed");
assert.deepStrictEqual(bad.errors.data.map((error) => error.line), [2, 3]);

const slow = await until(await create(await upload("slow.jsonl")), "in_progress");
assert.strictEqual((await client.batches.cancel(slow.id)).status, "cancelling");
const cancelled = await until(await client.batches.retrieve(slow.id), "cancelled");

assert.deepStrictEqual((await all(client.batches.list({ limit: 1 }))).map((one) => one.id), [slow.id, bad.id, done.id]);
assert.strictEqual((await all(client.files.list({ limit: 2, purpose: "batch" }))).length, 3);
assert.strictEqual(await status(client.batches.cancel(cancelled.id)), 409);
assert.strictEqual(await status(client.batches.create({ input_file_id: file.id, endpoint: "/v1/moderations", completion_window })), 400);
assert.strictEqual((await client.files.delete(file.id)).deleted, true);
assert.strictEqual(await status(client.files.retrieve(file.id)), 404);
assert.strictEqual(await status(create(file)), 404);
