// The same in JavaScript: a tool that is used, and the events of a stream.
import Anthropic from "@anthropic-ai/sdk";

// --- shown
const client = new Anthropic();
const word = { enum: ["cat", "dog"] };
const asked = { model: "pocket", max_tokens: 200, messages: [{ role: "user", content: "Spell cat." }] };
const tools = [{ name: "spell", input_schema: { type: "object", properties: { word }, required: ["word"] } }];
const using = await client.messages.create({ ...asked, temperature: 0, tools, tool_choice: { type: "any" } });
console.log(using.stop_reason, using.content.at(-1).name, using.content.at(-1).input);

const kinds = {};
const stream = client.messages.stream({ ...asked, temperature: 0 });
for await (const event of stream) kinds[event.type] = (kinds[event.type] ?? 0) + 1;
const counts = Object.entries(kinds).map(([kind, count]) => `${count} ${kind}`);
console.log(counts.join(", "));
console.log(await stream.finalText());
