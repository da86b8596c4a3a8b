// The same in JavaScript: a schema, a tool call, the events of a response, a conversation.
import OpenAI from "openai";
import { zodResponseFormat, zodFunction } from "openai/helpers/zod";
import { z } from "zod";

// --- shown
const client = new OpenAI();
const asked = { model: "pocket", temperature: 0, messages: [{ role: "user", content: "Spell cat." }] };
const Animal = z.object({ name: z.enum(["cat", "dog"]), legs: z.literal(4) });
const format = zodResponseFormat(Animal, "animal");
const { choices } = await client.chat.completions.parse({ ...asked, response_format: format });
console.log("object:", choices[0].message.parsed);
const spell = zodFunction({ name: "spell", parameters: z.object({ word: z.enum(["cat", "dog"]) }) });
const calling = await client.chat.completions.create({ ...asked, tools: [spell], tool_choice: "required" });
console.log("call:", calling.choices[0].message.tool_calls[0].function);

const response = { model: "pocket", temperature: 0, input: "Spell cat." };
const stream = client.responses.stream(response);
const kinds = {};
for await (const event of stream) kinds[event.type] = (kinds[event.type] ?? 0) + 1;
const counts = Object.entries(kinds).map(([kind, count]) => `${count} ${kind.replace("response.", "")}`);
console.log("events:", counts.join(", "), "-", (await stream.finalResponse()).output_text);

const conversation = (await client.conversations.create()).id;
for (const input of ["Spell cat.", "Spell dog."]) {
  const { output_text } = await client.responses.create({ ...response, input, conversation });
  console.log("conversation:", input, output_text);
}
