"""The chat page in a real browser, against a gateway with scripted answers."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alignedserve.api.errors import GenerationError
from alignedserve.api.models.model_services import ModelCard
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.request import Request
from alignedserve.gateway.server import HttpServer, bind
from tests.gateway.support import EOS, services_for, tokenizer, tokenizer_folder, tokens_of
from tests.harnesses.scripted_backend import Script, ScriptedBackend
from tests.support.browser import CHROMIUM, Tab, browser, browser_page
from tests.support.marks import each
from tests.support.waiting import holds

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

CODE = "print('otter')"
ANSWER = (
    f"Here is **bold**.\n\n```python\n{CODE}\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n[A link](https://example.org/)"
)
# Keeps the bodies that the page sends, and answers instead of the server what `stubs` has.
STUB = """
window.bodies = [];
const real = window.fetch;
window.fetch = async (path, options = {}) => {
  if (options.body) window.bodies.push(JSON.parse(options.body));
  return window.stubs && path in window.stubs ? new Response(window.stubs[path]) : real(path, options);
};
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with browser(tmp_path_factory.mktemp("browser")) as address:
        yield address


@dataclass
class ShownPage:
    """The page of a running gateway."""

    page: Tab
    backend: ScriptedBackend
    url: str

    async def ask(self, text: str, *, waits: bool = True) -> None:
        """Ask as a person does, and wait until the answer has ended."""
        await self.page.fill("#text", text)
        await self.page.click("#send")
        if waits:
            await self.answered()

    async def answered(self) -> None:
        await self.page.until("!document.querySelector('.turn.running') && document.getElementById('stop').hidden")

    async def lists(self, *titles: str) -> None:
        """Wait until these conversations are listed."""
        shown = "[...document.querySelectorAll('#talk-list .title')].map((title) => title.innerText)"
        await self.page.until(f"JSON.stringify({shown}) === JSON.stringify({json.dumps(titles)})")

    async def shows(self, question: str) -> None:
        """Wait until the conversation that is shown begins with this question."""
        await self.page.until(f"document.querySelector('.bubble')?.innerText === {json.dumps(question)}")

    async def begins_to_answer(self) -> None:
        await self.page.until("[...document.querySelectorAll('.markdown')].at(-1).innerText.length > 3")

    async def ready(self) -> None:
        await self.page.until("document.querySelector('#examples button') !== null")

    def prompts(self) -> list[str]:
        """Return the conversations that the model has seen, as its template writes them."""
        return [_prompt_of(request) for request in self.backend.submitted]


def _prompt_of(request: Request) -> str:
    return tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False)


def _echoing(request: Request) -> Script:
    """Repeat the last question; the answer to "broken" fails, and "slow" comes slowly."""
    question = _prompt_of(request).rpartition("<|user|>")[2].partition("<|end|>")[0]
    text = ANSWER if question == "Markdown?" else f"You said: {question}"
    failure = GenerationError("The worker was lost.") if question == "broken" else None
    return Script((*tokens_of(text), EOS), token_delay_s=0.1 if question == "slow" else 0.0, failure=failure)


@asynccontextmanager
async def _shown(
    chromium: str, folder: Path, *, context_len: int = 4096, keys: tuple[str, ...] = ()
) -> AsyncIterator[ShownPage]:
    backend = ScriptedBackend(_echoing)
    card = ModelCard("tiny", tokenizer_folder(), context_len, (EOS,), created=1_700_000_000)
    server = HttpServer(services_for(backend, GatewayConfig(), keys, model=card), bind("127.0.0.1", 0))
    await server.start()
    try:
        async with browser_page(chromium, folder) as page:
            await page.call("Page.addScriptToEvaluateOnNewDocument", source=STUB)
            shown = ShownPage(page, backend, f"http://127.0.0.1:{server.port}/")
            await page.open(shown.url)
            if not keys:
                await shown.ready()
            yield shown
            assert [url for url in page.requested if not url.startswith((shown.url, "data:", "blob:"))] == []
    finally:
        await server.stop()


async def test_an_answer_is_markdown_and_its_code_has_a_button_that_copies_it(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path) as shown:
        await shown.ask("Markdown?")
        assert await shown.page.texts(".markdown strong") == ["bold"]
        assert await shown.page.texts(".code figcaption span") == ["python"]
        assert await shown.page.texts(".markdown td[align=right]") == ["2"]
        link = await shown.page.run("document.querySelector('.markdown a').outerHTML")
        assert 'rel="noopener noreferrer nofollow"' in link
        assert 'target="_blank"' in link
        await shown.page.click("[data-act=copy-code]")
        await shown.page.until("document.querySelector('.code use').getAttribute('href') === '#icon-done'")
        assert await shown.page.run("navigator.clipboard.readText()") == CODE
        (note,) = await shown.page.texts(".note")
        assert "tokens, first after" in note
        assert await shown.page.texts("header a") == ["Dashboard"]
        assert shown.page.problems == []


HOSTILE = (
    "<script>taken()</script>",
    "<img src=x onerror=taken()>",
    "a <b onclick=taken()>b</b> <svg><script>taken()</script></svg>",
    "<iframe src='javascript:taken()'></iframe><iframe srcdoc='<script>parent.taken()</script>'></iframe>",
    "[click](javascript:taken()) [click](JaVaScRiPt:taken()) [click](&#106;avascript:taken())",
    "[click](data:text/html,<script>taken()</script>) [click](vbscript:taken()) [click](//example.org) [click](/v1)",
    '![picture](https://example.org/secret.png) ![picture](x" onerror="taken\\(\\)) ![p](data:image/svg+xml,<svg/>)',
    '<https://example.org/"onmouseover="taken()> http://example.org/"onclick=taken()',
    '```" onmouseover=taken() x="\n</code></pre><script>taken()</script>\n```',
    "<style>*{display:none}</style><link rel=stylesheet href=https://example.org/x.css><base href=https://example.org>",
    "<form action=https://example.org><input name=key><button>Send</button></form><meta http-equiv=refresh content=0>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=taken()&gt;'>",
    "<noscript><p title='</noscript><img src=x onerror=taken()>'>",
    "[a]: javascript:taken()\n\n[a] [b][a]",
    "<div id=text class=main data-act=again style=position:fixed>x</div> <a href=https://example.org id=send>y</a>",
    "| <script>taken()</script> | [x](javascript:taken()) |\n|---|---|\n| <img src=x onerror=taken()> | <br> |",
    "{{constructor.constructor('taken()')()}} ${taken()} <!-- --!><img src=x onerror=taken()> -->",
)
SAFE = (
    "a, blockquote, br, button, code, del, div, em, figcaption, figure, h1, hr, li, ol, p, pre, span, strong, svg, "
    "table, tbody, td, th, thead, tr, ul, use"
)
# How a text is shown (`show`), and where (`element`).
WITH_MARKDOWN = """(async () => {
  const { MarkdownView } = await import("./page/markdown.js");
  const element = document.querySelector(".markdown");
  const show = (text) => {
    element.replaceChildren();
    new MarkdownView(element).show(text);
  };
  BODY
})()"""
FIND_HOSTILE = """
  const bad = [];
  let numTaken = 0;
  window.taken = () => { numTaken += 1; };
  for (const text of HOSTILE) {
    show(text);
    for (const part of element.querySelectorAll("*")) {
      part.dispatchEvent(new MouseEvent("mouseover"));
      const isActive = [...part.attributes].some(({ name }) => name.startsWith("on") || /^(style|src|id)$/.test(name));
      const misleads = part.hasAttribute("href") && part.tagName === "A" && !/^(https?|mailto):/.test(part.href);
      const isButton = part.hasAttribute("data-act") && part.dataset.act !== "copy-code";
      if (isActive || misleads || isButton || !part.matches(SAFE)) bad.push(text + " -> " + part.outerHTML);
    }
  }
  return [numTaken, bad];
"""


async def test_nothing_of_hostile_markdown_runs_loads_or_looks_like_the_page(chromium: str, tmp_path: Path) -> None:
    find = FIND_HOSTILE.replace("SAFE", json.dumps(SAFE)).replace("HOSTILE", json.dumps(HOSTILE))
    async with _shown(chromium, tmp_path) as shown:
        await shown.ask("hello")
        assert await shown.page.run(WITH_MARKDOWN.replace("BODY", find)) == [0, []]
        # Through the whole page, and again after a reload.
        await shown.ask(HOSTILE[1])
        await shown.page.open(shown.url)
        await shown.page.until("document.querySelectorAll('.turn').length === 2")
        assert await shown.page.texts(".markdown") == ["You said: hello", f"You said: {HOSTILE[1]}"]
        assert shown.page.problems == []


async def test_markdown_that_no_parser_bears_is_shown_in_time(chromium: str, tmp_path: Path) -> None:
    hard = [mark * 10_000 for mark in (">", "[", "- ", "*a", "`", "| a ", "<", "![](", "a\n")] + ["> " * 100_000]
    timed = """
      const slow = [];
      for (const text of TEXTS) {
        const beganMs = performance.now();
        show(text);
        const tookMs = performance.now() - beganMs;
        if (tookMs > 5000 || !element.textContent) slow.push([text.slice(0, 8), tookMs]);
      }
      return slow;
    """
    async with _shown(chromium, tmp_path) as shown:
        await shown.ask("hello")
        assert await shown.page.run(WITH_MARKDOWN.replace("BODY", timed.replace("TEXTS", json.dumps(hard)))) == []


async def test_blocks_that_are_complete_stay_while_the_answer_grows(chromium: str, tmp_path: Path) -> None:
    grown = """
      const view = new MarkdownView(element);
      const text = "# Title\\n\\n" + ANSWER;
      element.replaceChildren();
      view.show(text.slice(0, 12));
      const title = element.firstChild;
      for (let end = 12; end <= text.length + 7; end += 7) view.show(text.slice(0, end));
      const grown = element.innerHTML, isSame = title === element.firstChild;
      show(text);
      return [isSame, grown === element.innerHTML];
    """
    async with _shown(chromium, tmp_path) as shown:
        await shown.ask("hello")
        body = grown.replace("ANSWER", json.dumps(ANSWER))
        assert await shown.page.run(WITH_MARKDOWN.replace("BODY", body)) == [True, True]


async def test_a_narrow_page_never_scrolls_sideways(chromium: str, tmp_path: Path) -> None:
    row = "| cell " * 40 + "|\n"
    texts = {
        "a long word": "x" * 900,
        "long code": "```\n" + "long code " * 500 + "\n```",
        "a wide table": row + "|---" * 40 + "|\n" + row * 300,
        "a deep list": "- " * 30 + "a",
        "a long link": "[" + "y" * 300 + "](https://example.org)",
    }
    sideways = "[document.documentElement, document.querySelector('main')].map((p) => p.scrollWidth - p.clientWidth)"
    async with _shown(chromium, tmp_path) as shown:
        await shown.page.resize(390, 780)
        assert await shown.page.run(sideways) == [0, 0]
        await shown.ask("w" * 300)
        for name, text in texts.items():
            await shown.page.run(WITH_MARKDOWN.replace("BODY", f"show({json.dumps(text)})"))
            assert await shown.page.run(sideways) == [0, 0], name
        for button in ("#set", "#menu", "[data-act=edit]"):
            await shown.page.click(button)
            assert await shown.page.run(sideways) == [0, 0], button
        assert await shown.page.run("document.querySelector('#talks').getBoundingClientRect().right") <= 390


HALF = 'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
DONE = "data: [DONE]\n\n"
ENDED = "The connection ended before the answer did."


@each(
    ("stream", "text", "failure"),
    [
        (HALF, "Half", ENDED),
        (HALF + 'data: {"choi', "Half", ENDED),
        ('data: {"error": {"message": "The worker was lost."}}\n\n', "", "The worker was lost."),
        (": waiting\n\n" * 3 + HALF + DONE, "Half", ""),  # while nothing comes
        ("", "", ENDED),
    ],
)
async def test_a_stream_that_breaks_says_so_and_leaves_what_came(
    stream: str, text: str, failure: str, chromium: str, tmp_path: Path
) -> None:
    async with _shown(chromium, tmp_path) as shown:
        await shown.page.run(f"window.stubs = {json.dumps({'v1/chat/completions': stream})}")
        await shown.ask("hello")
        assert (await shown.page.texts(".markdown"), await shown.page.texts(".failure")) == ([text], [failure])
        await shown.page.run("delete window.stubs")
        await shown.page.click("[data-act=again]")
        await shown.answered()
        assert (await shown.page.texts(".markdown"), await shown.page.texts(".failure")) == (["You said: hello"], [""])


async def test_failures_of_the_server_and_no_server_are_said(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path) as shown:
        await shown.ask("broken")
        await shown.page.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
        await shown.ask("hello")
        failures = ["The server had an error while processing the request.", "The server cannot be reached."]
        assert await shown.page.texts(".failure") == failures


async def test_an_answer_is_stopped_and_what_came_stays(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path) as shown:
        await shown.ask("slow", waits=False)
        await shown.begins_to_answer()
        await shown.page.click("#stop")
        await shown.answered()
        (text,) = await shown.page.texts(".markdown")
        assert "You said: slow".startswith(text)
        assert await shown.page.texts(".failure") == ["Stopped."]
        await holds(lambda: len(shown.backend.aborted) == 1)


async def test_edit_and_regenerate_cut_the_conversation_there(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path) as shown:
        for text in ("first", "second", "third"):
            await shown.ask(text)
        await shown.page.click(".turn:nth-child(2) [data-act=again]")
        await shown.answered()
        assert await shown.page.texts(".bubble") == ["first", "second"]
        assert shown.prompts()[-1] == shown.prompts()[1]
        await shown.page.click(".turn:nth-child(1) [data-act=edit]")
        await shown.page.fill(".edit textarea", "changed")
        await shown.page.submit(".edit")
        await shown.answered()
        assert await shown.page.texts(".bubble") == ["changed"]
        assert shown.prompts()[-1] == "<|bos|><|user|>changed<|end|>\n<|assistant|>"
        await shown.lists("changed")
        await shown.page.click("[data-act=edit]")
        await shown.page.click("[data-act=keep]")
        assert await shown.page.texts(".markdown") == ["You said: changed"]


async def test_conversations_outlast_the_page_and_are_exported_and_deleted(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path) as shown:
        await shown.ask("first\nline")
        await shown.page.click("#fresh")
        await shown.ask("second")
        await shown.page.open(shown.url)
        await shown.shows("second")
        await shown.lists("second", "first line")
        await shown.page.click("#talk-list li:nth-child(2) .title")
        await shown.shows("first\nline")
        await shown.ask("and more")
        assert "first\nline<|end|>" in shown.prompts()[-1]
        await shown.lists("first line", "second")  # the newest first
        await shown.page.click("#talk-list li:nth-child(1) [data-act=export]")
        await shown.page.click("#export-all")
        page, lines = tmp_path / "first-line.md", tmp_path / "conversations.jsonl"
        await holds(lambda: page.exists() and lines.exists())
        assert "**You**\n\nfirst\nline\n\n**tiny**\n\nYou said: first" in page.read_text()
        talks = [json.loads(line)["messages"] for line in lines.read_text().splitlines()]
        assert [(talk[0]["content"], len(talk)) for talk in talks] == [("second", 2), ("first\nline", 4)]
        delete = "#talk-list li:nth-child(1) [data-act=delete]"
        await shown.page.click(delete)
        await shown.lists("first line", "second")  # not by one click
        await shown.page.click(delete)
        await shown.lists("second")
        assert await shown.page.texts(".bubble") == []
        for _ in range(2):
            await shown.page.click("#delete-all")
        await shown.lists()
        await shown.page.open(shown.url)
        await shown.ready()
        await shown.lists()
        assert await shown.page.texts(".turn") == []


async def test_an_answer_goes_on_beside_another_conversation(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path) as shown:
        await shown.ask("slow", waits=False)
        await shown.begins_to_answer()
        await shown.page.click("#fresh")
        await shown.ask("quick")
        await shown.lists("quick", "slow")
        await shown.page.click("#talk-list li:nth-child(2) .title")
        await shown.shows("slow")
        await shown.answered()
        assert await shown.page.texts(".markdown") == ["You said: slow"]


async def test_a_reload_leaves_what_came(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path) as shown:
        await shown.ask("slow", waits=False)
        await shown.page.until("document.querySelector('.markdown').innerText.length > 10")
        await shown.page.open(shown.url)
        await shown.shows("slow")
        assert await shown.page.texts(".failure") == ["The page was left before the answer ended."]


async def test_what_outgrows_the_context_is_forgotten_and_marked(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path, context_len=80) as shown:
        for text in ("hello world", "the quick brown fox", "jumps over the lazy dog", "how are you today"):
            await shown.ask(text)
        assert await shown.page.texts(".failure") == [""] * 4
        assert "hello world" not in shown.prompts()[-1]
        assert await shown.page.run("document.querySelectorAll('.turn.forgotten').length") >= 1


async def test_a_browser_that_keeps_nothing_still_chats(chromium: str, tmp_path: Path) -> None:
    closed = "indexedDB.open = () => { throw new DOMException('denied', 'SecurityError'); }"
    async with _shown(chromium, tmp_path) as shown:
        await shown.page.call("Page.addScriptToEvaluateOnNewDocument", source=closed)
        await shown.page.open(shown.url)
        await shown.ready()
        for text in ("hello", "and again"):
            await shown.ask(text)
        assert await shown.page.texts(".markdown") == ["You said: hello", "You said: and again"]
        assert await shown.page.texts("#notice") == ["This browser keeps no conversations, or has no room for more."]


async def test_a_server_that_starts_is_looked_for_again(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path) as shown:
        none = "window.stubs ??= { 'v1/models': JSON.stringify({ data: [] }) }"
        await shown.page.call("Page.addScriptToEvaluateOnNewDocument", source=none)
        await shown.page.open(shown.url)
        await shown.page.until("document.getElementById('hint').innerText.startsWith('The server serves no model')")
        await shown.page.run("delete window.stubs['v1/models']")
        await shown.ready()
        assert await shown.page.texts("#greeting") == ["Ask tiny"]


async def test_enter_sends_and_with_shift_does_not(chromium: str, tmp_path: Path) -> None:
    press = "document.querySelector('#text').dispatchEvent(new KeyboardEvent('keydown', OPTIONS))"
    async with _shown(chromium, tmp_path) as shown:
        await shown.page.fill("#text", "hello")
        for options in ({"shiftKey": True}, {"isComposing": True}, {}):
            assert await shown.page.texts(".bubble") == []
            await shown.page.run(press.replace("OPTIONS", json.dumps({"key": "Enter", "cancelable": True, **options})))
        await shown.answered()
        assert await shown.page.texts(".markdown") == ["You said: hello"]


async def test_a_key_is_asked_for_and_sent(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path, keys=("right",)) as shown:
        await shown.page.until("!document.getElementById('key-form').hidden")
        await shown.page.fill("#key", "wrong")
        await shown.page.submit("#key-form")
        await shown.page.until("document.getElementById('notice').innerText.startsWith('A valid API key is required')")
        await shown.page.fill("#key", "right")
        await shown.page.submit("#key-form")
        await shown.ready()
        await shown.ask("hello")
        assert await shown.page.texts(".markdown") == ["You said: hello"]
        assert await shown.page.run("document.getElementById('key-form').hidden")


async def test_instructions_and_sampling_are_sent(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path) as shown:
        await shown.page.click("#set")
        await shown.page.fill("#instructions", "Be short.")
        await shown.page.fill("[name=temperature]", "0.5")
        await shown.ask("hello")
        assert shown.prompts() == ["<|bos|><|system|>Be short.<|end|>\n<|user|>hello<|end|>\n<|assistant|>"]
        sampling = shown.backend.submitted[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.5, 0.9, 1.1)


ATTACH = """new Promise((resolve) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 3000, height: 1000 });
  canvas.toBlob((blob) => {
    const files = new DataTransfer();
    files.items.add(new File([blob], "otter.png", { type: "image/png" }));
    document.getElementById("file").files = files.files;
    document.getElementById("file").dispatchEvent(new Event("change"));
    resolve();
  });
})"""


async def test_a_model_that_sees_gets_small_pictures_and_others_none(chromium: str, tmp_path: Path) -> None:
    blind: dict[str, Any] = {"id": "blind", "max_model_len": 4096}
    seeing = {**blind, "id": "seeing", "input_modalities": ["text", "image"], "example_questions": ["What is this?"]}
    stubs = json.dumps({"v1/models": json.dumps({"data": [blind, seeing]}), "v1/chat/completions": HALF + DONE})
    async with _shown(chromium, tmp_path) as shown:
        await shown.page.call("Page.addScriptToEvaluateOnNewDocument", source=f"window.stubs = {stubs}")
        await shown.page.open(shown.url)
        await shown.ready()
        assert await shown.page.run("document.getElementById('show').hidden")
        assert len(await shown.page.texts("#examples button")) == 4
        await shown.page.fill("#models", "seeing")
        assert not await shown.page.run("document.getElementById('show').hidden")
        assert await shown.page.texts("#examples button") == ["What is this?"]
        for _ in range(2):
            await shown.page.run(ATTACH)
        await shown.page.until("document.querySelectorAll('#shown img').length === 2")
        await shown.page.click("#shown button")
        await shown.page.click("#examples button")
        await shown.answered()
        (body,) = await shown.page.run("window.bodies")
        picture, text = body["messages"][0]["content"]
        assert (text, body["model"]) == ({"type": "text", "text": "What is this?"}, "seeing")
        assert picture["image_url"]["url"].startswith("data:image/")
        assert await shown.page.run("document.querySelector('.question img').naturalWidth") == 1280


async def test_the_dashboard_is_a_link_away(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path) as shown:
        await shown.page.click("#dashboard")
        await shown.page.until("document.querySelectorAll('.tile').length === 6")
        assert [text for text in shown.page.problems if not text.startswith("Failed to load")] == []  # no usage here


async def test_colours_follow_the_system(chromium: str, tmp_path: Path) -> None:
    async with _shown(chromium, tmp_path) as shown:
        colours = set()
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            await shown.page.call("Emulation.setEmulatedMedia", features=features)
            colours.add(await shown.page.run("getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2
