// Markdown of a model as elements. Nothing in it runs, fetches or looks like a part of the page: HTML is shown as
// text, a picture is a link, and DOMPurify passes the tags below alone.

import { Marked } from "./vendor/marked.esm.js";

const LONGEST = 50_000;  // characters; some take seconds to parse
const CLEAN = {
  ALLOWED_TAGS: "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["href", "title", "align", "start", "data-language"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["title", "align", "start", "data-language"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (mark) => "&#" + mark.charCodeAt(0) + ";");

// Line breaks are what cells of tables need.
const shownHtml = (text) => escaped(text).replace(/\n|&#60;br *\/?&#62;/gi, "<br>");

const marked = new Marked({
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${shownHtml(text.trim())}</p>` : shownHtml(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) => `<pre data-language="${escaped((lang || "").split(" ")[0])}"><code>${escaped(text)}</code></pre>`,
  },
});

/** An element's text as Markdown. While the text grows, blocks that are complete stay as they are. */
export class MarkdownView {
  #element;
  #blocks = [];

  constructor(element) {
    this.#element = element;
  }

  show(text) {
    try {
      if (text.length <= LONGEST) {
        this.#showBlocks(marked.lexer(text));
        return;
      }
    } catch {
      // Thousands of quotations in each other.
    }
    this.#blocks = [];
    this.#element.replaceChildren(element("p", { className: "plain-text", textContent: text }));
  }

  #showBlocks(tokens) {
    const blocks = this.#blocks;
    let num = 0;
    if (!blocks.length) {
      this.#element.replaceChildren();
    }
    while (num < Math.min(tokens.length, blocks.length) && tokens[num].raw === blocks[num].raw) {
      num += 1;
    }
    blocks.splice(num).forEach(({ nodes }) => nodes.forEach((node) => node.remove()));
    for (const token of tokens.slice(num)) {
      const fragment = DOMPurify.sanitize(marked.parser([token], marked.defaults), CLEAN);
      dress(fragment);
      blocks.push({ raw: token.raw, nodes: [...fragment.childNodes] });
      this.#element.append(fragment);
    }
  }
}

function element(tag, properties) {
  return Object.assign(document.createElement(tag), properties);
}

// Links open beside the page; tables scroll; code has its language and a button above it.
function dress(fragment) {
  for (const link of fragment.querySelectorAll("a")) {
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow" });
  }
  for (const table of fragment.querySelectorAll("table")) {
    const scroll = element("div", { className: "scroll", tabIndex: 0 });
    table.replaceWith(scroll);
    scroll.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    const figure = document.getElementById("code").content.firstElementChild.cloneNode(true);
    figure.querySelector("span").textContent = pre.dataset.language;
    pre.tabIndex = 0;
    pre.replaceWith(figure);
    figure.append(pre);
  }
}
