// The turns of one conversation on the page. A turn is a question and its answer; what its buttons do comes as `acts`.

import { MarkdownView } from "./markdown.js";

const byId = (id) => document.getElementById(id);
const main = document.querySelector("main");

/** A new element from a template of the page. */
export function made(id) {
  return byId(id).content.firstElementChild.cloneNode(true);
}

export class TalkView {
  #views = new Map();  // by turn, of those shown
  #acts;

  /** `acts`: again(turn), edit(turn, text); they cut the conversation after the turn. */
  constructor(acts) {
    this.#acts = acts;
    byId("log").addEventListener("click", (event) => this.#onClick(event));
  }

  /** Show a conversation. Turns that are shown already stay as they are. */
  show({ turns, start }, isRunning) {
    for (const [turn, { element }] of this.#views) {
      if (!turns.includes(turn)) {
        element.remove();
        this.#views.delete(turn);
      }
    }
    turns.forEach((turn, place) => {
      const { element } = this.#views.get(turn) || this.#add(turn, isRunning && turn === turns.at(-1));
      element.classList.toggle("forgotten", place < start);
    });
    byId("welcome").hidden = turns.length > 0;
    main.scrollTop = main.scrollHeight;
  }

  #add(turn, isRunning) {
    const element = made("turn");
    const markdown = new MarkdownView(element.querySelector(".markdown"));
    const view = { element, markdown, isRunning, isDue: false, drawnMs: 0 };
    element.querySelector(".bubble").textContent = turn.question.text;
    element.querySelector(".pictures").replaceChildren(...turn.question.pictures.map(pictureOf));
    byId("log").append(element);
    this.#views.set(turn, view);
    this.#draw(turn, view);
    return view;
  }

  /** Show what the answer is by now, soon if more is coming. A turn that is not on the page is left out. */
  update(turn, isRunning) {
    const view = this.#views.get(turn);
    if (!view) {
      return;
    }
    view.isRunning = isRunning;
    if (!isRunning) {
      this.#draw(turn, view);
    } else if (!view.isDue) {
      view.isDue = true;
      setTimeout(() => view.isDue && this.#draw(turn, view), 16 + 3 * view.drawnMs);  // never busy with it alone
    }
  }

  #draw({ answer }, view) {
    const beganMs = performance.now();
    const follows = main.scrollHeight - main.scrollTop - main.clientHeight < 60;
    const { element, isRunning } = view;
    view.isDue = false;
    const thought = element.querySelector(".thought");
    thought.hidden = !answer.thought;
    thought.lastElementChild.textContent = answer.thought;
    thought.firstElementChild.textContent = isRunning && !answer.text ? "Thinking…" : "Thought";
    view.markdown.show(answer.text);
    element.classList.toggle("running", isRunning);
    element.classList.toggle("waiting", isRunning && !answer.text && !answer.thought);
    element.setAttribute("aria-busy", String(isRunning));
    element.querySelector(".failure").textContent = answer.failure;
    element.querySelector(".failure").hidden = isRunning || !answer.failure;
    element.querySelector("[data-act=copy-answer]").hidden = !answer.text;
    element.querySelector(".note").textContent = answer.note;
    if (follows) {
      main.scrollTop = main.scrollHeight;
    }
    view.drawnMs = performance.now() - beganMs;
  }

  #onClick(event) {
    const button = event.target.closest("[data-act]");
    const [turn, view] = [...this.#views].find(([, { element }]) => element.contains(button)) || [];
    if (!button || !view) {
      return;
    }
    const doing = {
      again: () => this.#acts.again(turn),
      edit: () => this.#edit(turn, view.element.querySelector(".question")),
      "copy-question": () => copy(turn.question.text, button),
      "copy-answer": () => copy(turn.answer.text, button),
      "copy-code": () => copy(button.closest("figure").querySelector("pre").textContent, button),
    };
    doing[button.dataset.act]?.();
  }

  #edit(turn, question) {
    const form = made("edit");
    const area = form.querySelector("textarea");
    const end = () => {
      question.classList.remove("editing");
      form.remove();
    };
    area.value = turn.question.text;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) {
        end();
        this.#acts.edit(turn, area.value.trim());
      }
    });
    form.querySelector("[data-act=keep]").addEventListener("click", end);
    area.addEventListener("input", () => fit(area));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        end();
      } else {
        submitOnEnter(event);
      }
    });
    question.classList.add("editing");
    question.append(form);
    fit(area);
    area.focus();
  }
}

export function pictureOf(url) {
  return Object.assign(document.createElement("img"), { src: url, alt: "A picture of the question" });
}

/** Make a text area as high as its text, within what the page's style allows. */
export function fit(area) {
  area.style.height = "auto";
  area.style.height = area.scrollHeight + 2 + "px";
}

export function submitOnEnter(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
}

async function copy(text, button) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {  // a page by plain HTTP from another host has none
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const icon = button.querySelector("use");
  icon.setAttribute("href", "#icon-done");
  setTimeout(() => icon.setAttribute("href", "#icon-copy"), 1500);
}
