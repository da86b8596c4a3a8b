// OpenAI's Node SDK: a whole answer, a streamed one, a refusal. Prints one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const asked = {
  model: process.env.MODEL,
  messages: [{ role: "user", content: "Spell cat." }],
  temperature: 0,
  max_completion_tokens: 24,
};
const { data: whole, response } = await client.chat.completions
  .create({ ...asked, metadata: { team: "a" }, store: true, made_up: 1 }, { headers: { "x-request-id": "of-node" } })
  .withResponse();
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const refused = await client.chat.completions.create({ ...asked, temperature: 9 }).catch((error) => error);
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    requestId: whole._request_id,
    ignored: response.headers.get("x-alignedserve-ignored-fields"),
    refused: [refused.constructor.name, refused.status, refused.param],
  }),
);
