// OpenAI's Node SDK over the Responses API: stored, continued, streamed, in the background. Prints one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const asked = { model: process.env.MODEL, input: "Spell cat.", temperature: 0, max_output_tokens: 24 };
const whole = await client.responses.create(asked);
const kinds = [];
let streamed = "";
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  kinds.push(event.type);
  if (event.type === "response.output_text.delta") streamed += event.delta;
}
const continued = await client.responses.create({ ...asked, previous_response_id: whole.id });
let background = await client.responses.create({ ...asked, background: true });
const first = background.status;
while (["queued", "in_progress"].includes(background.status)) {
  await new Promise((resolve) => setTimeout(resolve, 200));
  background = await client.responses.retrieve(background.id);
}
await client.responses.delete(whole.id);
const gone = await client.responses.retrieve(whole.id).catch((error) => error);
console.log(
  JSON.stringify({
    whole: whole.output_text,
    streamed,
    last: kinds.at(-1),
    longer: continued.usage.input_tokens > whole.usage.input_tokens,
    background: [first, background.status, background.output_text],
    gone: [gone.constructor.name, gone.status],
  }),
);
