// The chat page: which conversation and which model, what is asked, what the buttons do.
//
// A conversation (talk) is {id, title, model, instructions, changed, start, turns}; the model sees the turns from
// `start` on. A turn is {question: {text, pictures}, answer: {text, thought, note, failure}}.

import { dataUrlOf } from "./pictures.js";
import { listModels, streamAnswer, useKey } from "./server.js";
import * as store from "./store.js";
import { TalkView, fit, made, pictureOf, submitOnEnter } from "./view.js";

const byId = (id) => document.getElementById(id);
const LONGEST_ANSWER = 1024;  // tokens; at most a quarter of the context
const SAVE_EVERY_MS = 1000;
const LOOK_AGAIN_MS = 5000;
const GENERAL_EXAMPLES = [
  "What is the capital of France?",
  "Write one sentence about a fox.",
  "Explain in simple words why the sky is blue.",
  "Write a Python function that reverses a string.",
];
// Of models whose makers name nothing. Small ones repeat themselves without end at the likeliest token.
const OWN_SAMPLING = { temperature: 0.2, top_p: 0.9, repetition_penalty: 1.1 };

const view = new TalkView({
  again: (turn) => answer(talk.turns.indexOf(turn), turn.question),
  edit: (turn, text) => answer(talk.turns.indexOf(turn), { ...turn.question, text }),
});
const running = new Map();  // {talk, controller} of each answer that comes, by the conversation's id
let talk = newTalk();
let models = [];
let model = null;  // null: none is known, or the last one was removed; the next question looks again
let pictures = [];  // data URLs of the next question

// --- models

async function findModels() {
  try {
    models = await listModels();
  } catch (error) {
    byId("key-form").hidden = error.status !== 401;
    throw error;
  }
  byId("key-form").hidden = true;
  if (models.length === 0) {
    throw new Error("The server serves no model at the moment.");
  }
  const wanted = talk.model || sessionStorage.getItem("alignedserve-model");
  byId("models").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  byId("models").hidden = models.length < 2;
  byId("model").hidden = models.length >= 2;
  choose(models.find(({ id }) => id === wanted) || models[0]);
}

// The conversation goes on with the chosen model.
function choose(chosen) {
  model = chosen;
  byId("models").value = byId("model").textContent = model.id;
  byId("show").hidden = !(model.input_modalities || []).includes("image");
  byId("greeting").textContent = "Ask " + model.id;
  byId("hint").textContent = "The answer streams in as it is generated.";
  byId("examples").replaceChildren(...(model.example_questions || GENERAL_EXAMPLES).map((text) => {
    return Object.assign(document.createElement("button"), { type: "button", textContent: text, onclick: () => ask(text) });
  }));
  showSampling();
}

// A server that starts has no model yet. Without its key asking again is of no use.
async function keepLooking() {
  try {
    await findModels();
  } catch (error) {
    byId("hint").textContent = error.message;
    if (error.status !== 401) {
      setTimeout(() => model === null && keepLooking(), LOOK_AGAIN_MS);
    }
  }
}

// A field shows what holds; one that the person has written in is sent.
function showSampling() {
  const { source, ...values } = model.default_sampling || {};
  const defaults = source ? values : { ...values, ...OWN_SAMPLING };
  byId("sampling-source").textContent = source
    ? "By " + source + ". Write another value to change it; leave a field empty to have this one again."
    : "This page's own: the makers of the model name none. Write another value to change it.";
  for (const input of byId("sampling").elements) {
    input.placeholder = defaults[input.name] ?? "";
  }
}

function samplingFields() {
  const written = [...byId("sampling").elements].filter((input) => input.value !== "" && input.validity.valid);
  const own = model.default_sampling?.source ? {} : OWN_SAMPLING;
  return { ...own, ...Object.fromEntries(written.map((input) => [input.name, Number(input.value)])) };
}

// --- questions and answers

function ask(text) {
  const question = { text, pictures };
  pictures = [];
  showPictures();
  answer(talk.turns.length, question);
}

// Ask the question at a place of the conversation. What stood there goes, and all that followed.
async function answer(place, question) {
  const asked = talk, controller = new AbortController();
  running.get(asked.id)?.controller.abort();
  running.set(asked.id, { talk: asked, controller });
  const turn = { question, answer: { text: "", thought: "", note: "", failure: "The page was left before the answer ended." } };
  asked.turns.splice(place, Infinity, turn);
  asked.start = Math.min(asked.start, place);
  if (place === 0) {
    asked.title = question.text.replace(/\s+/g, " ").slice(0, 80);
  }
  showTalk();
  try {
    if (model === null) {
      await findModels();
    }
    asked.model = model.id;
    save(asked).then(showTitles);
    await receive(asked, turn, controller.signal);
    turn.answer.failure = "";
  } catch (error) {
    if (error.code === "model_not_found") {
      model = null;
    }
    byId("key-form").hidden = error.status !== 401;
    turn.answer.failure = error.name === "AbortError" ? "Stopped." : error.message;
  }
  view.update(turn, false);
  if (running.get(asked.id)?.controller === controller) {  // else it was asked again, or deleted
    running.delete(asked.id);
    await save(asked);
    showBusy();
    showTitles();
  }
}

async function receive(asked, turn, signal) {
  const startedMs = performance.now();
  let firstMs = null, savedMs = startedMs, usage = null, isCut = false;
  for await (const chunk of chunksOf(asked, signal)) {
    usage = chunk.usage || usage;
    const { delta = {}, finish_reason } = chunk.choices[0] || {};
    isCut ||= finish_reason === "length";
    if (delta.content || delta.reasoning_content) {
      firstMs ??= performance.now();
      turn.answer.thought += delta.reasoning_content || "";
      turn.answer.text += delta.content || "";
      view.update(turn, true);
    }
    if (performance.now() - savedMs > SAVE_EVERY_MS) {
      savedMs = performance.now();
      save(asked);
    }
  }
  turn.answer.note = noteOf(usage, startedMs, firstMs) + (isCut ? "; cut at the length limit" : "");
}

// Asks, and asks again without the oldest turn while the conversation is too long for the model.
async function* chunksOf(asked, signal) {
  const fields = { model: model.id, ...samplingFields(), stream: true, stream_options: { include_usage: true } };
  let limit = { max_tokens: Math.max(1, Math.min(LONGEST_ANSWER, Math.floor(model.max_model_len / 4))) };
  for (;;) {
    try {
      yield* streamAnswer({ ...fields, messages: messagesOf(asked), ...limit }, signal);
      return;
    } catch (failure) {
      const canForget = asked.start < asked.turns.length - 1;
      if (failure.code !== "context_length_exceeded" || !(canForget || limit.max_tokens)) {
        throw failure;
      }
      if (canForget) {
        asked.start += 1;
        showTalk();
      } else {
        limit = {};  // whatever the one long message leaves
      }
    }
  }
}

// Thoughts are not sent back, nor questions without an answer.
function messagesOf({ instructions, turns, start }) {
  const messages = instructions ? [{ role: "system", content: instructions }] : [];
  for (const { question, answer } of turns.slice(start)) {
    if (!answer.text && question !== turns.at(-1).question) {
      continue;
    }
    const parts = question.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
    messages.push({ role: "user", content: parts.length ? [...parts, { type: "text", text: question.text }] : question.text });
    if (answer.text) {
      messages.push({ role: "assistant", content: answer.text });
    }
  }
  return messages;
}

function noteOf(usage, startedMs, firstMs) {
  if (!usage || firstMs === null) {
    return "";
  }
  const { completion_tokens: num, prompt_tokens, prompt_tokens_details } = usage;
  const seconds = (performance.now() - firstMs) / 1000;
  const parts = [num + (num === 1 ? " token" : " tokens"), "first after " + Math.round(firstMs - startedMs) + " ms"];
  if (prompt_tokens_details?.cached_tokens) {
    parts.push(prompt_tokens_details.cached_tokens + " of " + prompt_tokens + " prompt tokens cached");
  }
  if (num > 1 && seconds > 0) {
    parts.push(((num - 1) / seconds).toFixed(0) + " tokens/s");
  }
  return parts.join(", ");
}

// --- conversations

function newTalk() {
  return { id: crypto.getRandomValues(new Uint32Array(4)).join("-"), title: "", model: "", instructions: "", start: 0, turns: [] };
}

async function save(saved) {
  saved.changed = Date.now();
  await store.save(saved).catch(() => say("This browser keeps no conversations, or has no room for more."));
}

function open(opened) {
  talk = opened;
  sessionStorage.setItem("alignedserve-talk", talk.id);
  byId("instructions").value = talk.instructions;
  const known = models.find(({ id }) => id === talk.model);
  if (known) {
    choose(known);
  }
  pictures = [];
  showPictures();
  showTalk();
  showTitles();
  showDrawer(false);
  say("");
  if (matchMedia("(hover: hover)").matches) {  // else a keyboard would cover the page
    byId("text").focus();
  }
}

function showTalk() {
  view.show(talk, running.has(talk.id));
  showBusy();
}

function showBusy() {
  const isBusy = running.has(talk.id);
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
}

async function showTitles() {
  const titles = await store.titles().catch(() => []);
  byId("no-talks").hidden = titles.length > 0;
  document.querySelector("#talks .foot").hidden = titles.length === 0;
  byId("talk-list").replaceChildren(...titles.map(({ id, title }) => {
    const row = made("talk");
    row.querySelector(".title").textContent = title;
    row.classList.toggle("current", id === talk.id);
    row.querySelector(".title").addEventListener("click", async () => open(await loaded(id)));
    row.querySelector("[data-act=export]").addEventListener("click", async () => exportTalk(await loaded(id)));
    onSecondClick(row.querySelector("[data-act=delete]"), () => remove(id));
    return row;
  }));
}

// A conversation that is shown or being answered is newer than the stored one.
async function loaded(id) {
  return id === talk.id ? talk : running.get(id)?.talk || (await store.load(id)) || newTalk();
}

function forget(id) {
  running.get(id)?.controller.abort();
  running.delete(id);
  if (id === talk.id) {
    open(newTalk());
  }
}

async function remove(id) {
  forget(id);
  await store.remove(id);
  await showTitles();
}

async function removeAll() {
  [...running.keys(), talk.id].forEach(forget);
  await store.removeAll();
  await showTitles();
}

function exportTalk({ title, model: name, turns }) {
  const parts = turns.map(({ question, answer }) => `**You**\n\n${question.text}\n\n**${name}**\n\n${answer.text || answer.failure}\n`);
  download(title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) + ".md", [`# ${title}\n`, ...parts].join("\n"));
}

// A conversation a line, as the API takes it.
async function exportAll() {
  const lines = (await store.loadAll()).map((stored) => {
    const { title, model: name } = stored;
    return JSON.stringify({ title, model: name, messages: messagesOf({ ...stored, start: 0 }) }) + "\n";
  });
  download("conversations.jsonl", lines.join(""));
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// --- the rest of the page

function say(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

async function addPictures(files) {
  try {
    pictures.push(...(await Promise.all([...files].map(dataUrlOf))));
    say("");
  } catch (error) {
    say(error.message);
  }
  showPictures();
}

function showPictures() {
  byId("shown").replaceChildren(...pictures.map((url, place) => {
    const button = Object.assign(document.createElement("button"), { type: "button", title: "Remove the picture" });
    button.append(pictureOf(url));
    button.addEventListener("click", () => {
      pictures.splice(place, 1);
      showPictures();
    });
    return button;
  }));
}

function onSecondClick(button, act) {
  const reset = () => button.classList.remove("sure");
  button.addEventListener("blur", reset);
  button.addEventListener("click", () => {
    if (button.classList.contains("sure")) {
      reset();
      act();
    } else {
      button.classList.add("sure");
      button.focus();
    }
  });
}

function showDrawer(isOpen) {
  byId("talks").classList.toggle("open", isOpen);
  byId("shade").hidden = !isOpen;
  byId("menu").setAttribute("aria-expanded", String(isOpen));
}

byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (text && !running.has(talk.id)) {
    byId("text").value = "";
    fit(byId("text"));
    ask(text);
  }
});
byId("text").addEventListener("input", () => fit(byId("text")));
byId("text").addEventListener("keydown", submitOnEnter);
byId("text").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length && !byId("show").hidden) {
    event.preventDefault();
    addPictures(event.clipboardData.files);
  }
});
byId("show").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", async () => {
  await addPictures(byId("file").files);
  byId("file").value = "";
  byId("text").focus();
});
byId("stop").addEventListener("click", () => running.get(talk.id)?.controller.abort());
byId("fresh").addEventListener("click", () => open(newTalk()));
byId("export-all").addEventListener("click", exportAll);
onSecondClick(byId("delete-all"), removeAll);
byId("menu").addEventListener("click", () => showDrawer(true));
byId("shade").addEventListener("click", () => showDrawer(false));
document.addEventListener("keydown", (event) => event.key === "Escape" && showDrawer(false));
byId("models").addEventListener("change", () => {
  choose(models.find(({ id }) => id === byId("models").value));
  sessionStorage.setItem("alignedserve-model", model.id);
  Object.assign(talk, { model: model.id, start: 0 });
});
byId("set").addEventListener("click", () => {
  byId("settings").hidden = !byId("settings").hidden;
  byId("set").setAttribute("aria-expanded", String(!byId("settings").hidden));
});
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("instructions").addEventListener("change", () => {
  talk.instructions = byId("instructions").value.trim();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  findModels().then(() => say(""), (error) => say(error.message));
});
document.addEventListener("visibilitychange", showTitles);  // another tab may have changed them

open((await store.load(sessionStorage.getItem("alignedserve-talk")).catch(() => null)) || talk);
keepLooking();
