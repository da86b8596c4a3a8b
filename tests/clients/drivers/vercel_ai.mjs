// Vercel's AI SDK with its three providers: text, a stream, an object, a tool, embeddings. Prints one JSON object.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const name = process.env.MODEL;
const baseURL = process.env.OPENAI_BASE_URL;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "local", baseURL, supportsStructuredOutputs: true });
const anthropic = createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1`, apiKey: "none" });
const models = {
  responses: openai(name),
  chat: openai.chat(name),
  compatible: compatible(name),
  messages: anthropic(name),
};
const settings = { temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const Animal = z.object({ name: z.enum(["cat", "dog"]), legs: z.literal(4) });
const spell = tool({
  description: "Spell a word",
  inputSchema: z.object({ word: z.enum(["cat"]) }),
  execute: async ({ word }) => word.split("").join(" "),
});

async function drive(model) {
  const whole = await generateText({ model, prompt: "Spell cat.", ...settings });
  let streamed = "";
  for await (const piece of streamText({ model, prompt: "Spell cat.", ...settings }).textStream) streamed += piece;
  const object = await generateObject({ model, schema: Animal, prompt: "A cat.", ...settings });
  const called = await generateText({
    model,
    prompt: "Spell cat.",
    tools: { spell },
    toolChoice: { type: "tool", toolName: "spell" },
    stopWhen: stepCountIs(1),
    ...settings,
  });
  return {
    whole: whole.text,
    streamed,
    object: Object.keys(object.object).sort(),
    result: called.toolResults[0]?.output,
  };
}

const told = {};
for (const [kind, model] of Object.entries(models)) told[kind] = await drive(model);
const { embeddings } = await embedMany({ model: openai.textEmbeddingModel(name), values: ["cat", "dog"] });
told.embeddings = [embeddings.length, embeddings[0].length === embeddings[1].length];
console.log(JSON.stringify(told));
