// A stream by chat, an object by the Responses API, a tool by Messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

// --- shown
const baseURL = process.env.OPENAI_BASE_URL;
const chat = createOpenAICompatible({ name: "local", baseURL })("pocket");
const responses = createOpenAI({ baseURL, apiKey: "none" })("pocket");
const messages = createAnthropic({ baseURL, apiKey: "none" })("pocket");
const settings = { prompt: "Spell cat.", temperature: 0, maxOutputTokens: 200 };

const pieces = [];
for await (const piece of streamText({ model: chat, ...settings }).textStream) pieces.push(piece);
console.log("text:", pieces);
const schema = z.object({ name: z.enum(["cat", "dog"]), legs: z.literal(4) });
console.log("object:", (await generateObject({ model: responses, schema, ...settings })).object);
const inputSchema = z.object({ word: z.enum(["cat"]) });
const spell = tool({ inputSchema, execute: ({ word }) => word.split("").join(" ") });
const used = await generateText({ model: messages, tools: { spell }, toolChoice: "required", ...settings });
console.log("tool:", used.toolCalls[0].input, "->", used.toolResults[0].output);
