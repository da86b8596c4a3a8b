// Anthropic's Node SDK: a whole message, a streamed one, a count, models, a refusal. Prints one JSON object.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ maxRetries: 0 });
const asked = {
  model: process.env.MODEL,
  messages: [{ role: "user", content: "Spell cat." }],
  max_tokens: 24,
};
const whole = await client.messages.create({ ...asked, temperature: 0 });
const stream = client.messages.stream({ ...asked, temperature: 0, stop_sequences: ["t"] });
let numPieces = 0;
stream.on("text", () => (numPieces += 1));
const streamed = await stream.finalMessage();
const counted = await client.messages.countTokens({ model: asked.model, messages: asked.messages });
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const refused = await client.messages.create({ ...asked, temperature: 9 }).catch((error) => error);
console.log(
  JSON.stringify({
    whole: whole.content[0].text,
    stopReason: whole.stop_reason,
    streamed: streamed.content[0].text,
    stopSequence: streamed.stop_sequence,
    numPieces,
    inputTokens: whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
    counted: counted.input_tokens,
    models,
    refused: [refused.constructor.name, refused.status, refused.error.error.type, typeof refused.requestID],
  }),
);
