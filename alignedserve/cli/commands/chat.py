"""`alignedserve chat`: a conversation in the terminal with a running server.

Ctrl-C while an answer comes stops that answer; at the prompt it leaves, as does Ctrl-D. The text of a stopped or broken
answer stays in the conversation: the model sees the same as the person. A message that got no text at all is taken
back, so that it can be asked again. A conversation that outgrows the model's context loses its oldest messages. From a
pipe each line is a turn, and what stands there of commands is obeyed."""

import asyncio
import base64
import contextlib
import mimetypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.markup import escape

from alignedserve.cli.console import FAILURE, INTERRUPTED, notes, print_error, printable
from alignedserve.cli.options import EFFORTS, ChatCommandOptions
from alignedserve.client.openai_client import (
    ClientFailure,
    ClientFailureKind,
    CompletionApi,
    CompletionCall,
    CompletionOutcome,
    ListedModel,
    OpenAiClient,
)
from alignedserve.client.sse import is_key_wanted
from alignedserve.config.environment import CLIENT_KEY_VARIABLE, client_api_key
from alignedserve.config.sections import SAMPLING_FIELDS
from alignedserve.core.errors import ConfigError, InvalidRequest, PeerError
from alignedserve.core.request import SamplingParams

_MAX_BYTES = 32 << 20


def picture_part(path: str) -> dict[str, object]:
    """Return the part of a message with the picture in this file. Raises ConfigError."""
    file = Path(path).expanduser()
    kind, _ = mimetypes.guess_type(file.name)
    if kind is None or not kind.startswith("image/"):
        raise ConfigError(f"{path}: its name is not one of a picture, such as otter.jpg")
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_BYTES >> 20} MiB")
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(content).decode()}"}}


# Of models whose makers name nothing. Small ones repeat themselves without end at the likeliest token.
_OWN = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
_OF_EVERY_SERVER = ("temperature", "top_p")  # the others are extensions of OpenAI's API
_DEFAULT = "default"


class ChatSampling:
    """What the person has set."""

    def __init__(self, temperature: float | None = None) -> None:
        self._set: dict[str, float] = {} if temperature is None else {"temperature": temperature}

    def fields(self, model: ListedModel) -> dict[str, float]:
        """Return the fields of a request; what the server takes by itself is left out."""
        if self._set.get("temperature") == 0.0:
            return dict(self._set)
        return {**self._beside_server(model), **self._set}

    def in_words(self, model: ListedModel) -> str:
        known = model.sampling if model.sampling_source else {}
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0, "repetition_penalty": 1.0}
        taken = {**plain, **known, **self.fields(model)}
        shown = [
            f"{name} {taken[name]:g}" for name in SAMPLING_FIELDS if name in self._set or taken[name] != plain[name]
        ]
        who = model.sampling_source or "this program's own, as the makers of the model name none"
        return f"{', '.join(shown) or 'temperature 1'} ({who}{'; changed here' if self._set else ''})"

    def change(self, argument: str) -> None:
        """Obey `NAME VALUE`, or `NAME default`. Raises ConfigError saying what is wrong."""
        name, _, text = argument.partition(" ")
        if name not in SAMPLING_FIELDS:
            raise ConfigError(f"/set takes one of {', '.join(SAMPLING_FIELDS)}, and a number or {_DEFAULT}")
        if text.strip() == _DEFAULT:
            self._set.pop(name, None)
            return
        try:
            value = int(text) if name == "top_k" else float(text)
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise ConfigError(str(error)) from error
        except ValueError as error:
            raise ConfigError(f"/set {name} takes a number, or {_DEFAULT}") from error
        self._set[name] = value

    def _beside_server(self, model: ListedModel) -> Mapping[str, float]:
        if model.sampling_source:
            return {}
        is_extended = model.max_context_len is not None
        return {name: value for name, value in _OWN.items() if is_extended or name in _OF_EVERY_SERVER}


with contextlib.suppress(ImportError):
    import readline  # noqa: F401 - gives input() line editing and a history

PROMPT = "> "
MAX_ANSWER_LEN = 1024  # tokens; at most a quarter of the context
_DEFAULT_EFFORT = "default"  # the model's own
_CONTEXT_EXCEEDED = "context_length_exceeded"
HELP = """/new          forget the conversation
/system TEXT  set the system message (empty: remove it) and start anew
/model NAME   talk to another model from here on (without NAME: list the served models)
/set NAME N   sample otherwise: temperature, top_p, top_k, min_p, repetition_penalty; default: as before
              (without NAME: show what holds)
/image FILE   show a picture beside your next message, to a model that sees
/think LEVEL  how much to think: none, minimal, low, medium, high, xhigh, max, or default (the model's own)
/help         this list
/quit         leave (so do Ctrl-D, and Ctrl-C at the prompt)
Ctrl-C while an answer comes stops that answer."""


@dataclass(slots=True)
class ChatConversation:
    """The messages so far."""

    system: str | None = None
    turns: list[dict[str, object]] = field(default_factory=list)
    pictures: list[dict[str, object]] = field(default_factory=list)  # parts of the next question

    def messages(self) -> list[dict[str, object]]:
        system: list[dict[str, object]] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def ask(self, text: str) -> None:
        shown, self.pictures = self.pictures, []
        self.turns.append({"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text})

    def settle(self, answer: str) -> None:
        """Add the answer, whole or not; without any text take the question back."""
        if answer:
            self.turns.append({"role": "assistant", "content": answer})
        else:
            self.turns.pop()

    def forget_oldest(self) -> bool:
        if len(self.turns) < 3:
            return False
        del self.turns[:2]
        return True

    def restart(self) -> None:
        self.turns.clear()
        self.pictures.clear()


def chat(options: ChatCommandOptions) -> int:
    if options.reasoning_effort not in (None, *EFFORTS):
        raise ConfigError(f"--reasoning-effort: must be one of {', '.join(EFFORTS)}")
    model = _chosen_model(options)
    session = ChatSession(options=options, model=model)
    if options.once is not None:
        return session.answer_once(sys.stdin.read() if options.once == "-" else options.once)
    if not sys.stdin.isatty():
        return session.answer_lines(sys.stdin)
    return session.converse()


def _chosen_model(options: ChatCommandOptions) -> ListedModel:
    if options.model is None:
        return asyncio.run(_served_models(options.url))[0]
    try:
        return find_model(asyncio.run(_served_models(options.url)), options.model)
    except (PeerError, ConfigError):  # some servers list not all that they serve
        return ListedModel(options.model)


async def _served_models(url: str) -> tuple[ListedModel, ...]:
    async with OpenAiClient(url=url, api_key=client_api_key()) as client:
        return await client.listed_models()


def find_model(listed: Sequence[ListedModel], name: str) -> ListedModel:
    """Return the model of this name. Raises ConfigError naming those there are."""
    model = next((model for model in listed if model.name == name), None)
    if model is None:
        names = ", ".join(printable(model.name) for model in listed)
        raise ConfigError(f"the server has no model {name}; it serves {names}")
    return model


class ChatSession:
    """One run of the program."""

    def __init__(self, *, options: ChatCommandOptions, model: ListedModel) -> None:
        self._options = options
        self._model = model
        self._conversation = ChatConversation(system=options.system)
        self._thoughts = _ThoughtPrinter()
        self._sampling = ChatSampling(options.temperature)
        self._effort = options.reasoning_effort  # None: the model's own
        self._has_forgotten = False  # during the latest answer

    def answer_once(self, prompt: str) -> int:
        self._thoughts.is_hidden = not notes().is_terminal  # a script reads the answer alone
        if not prompt.strip():
            raise ConfigError("there is no prompt: neither --once nor anything on stdin")
        outcome, was_interrupted = self._answer(prompt.strip())
        if was_interrupted:
            return INTERRUPTED
        return FAILURE if outcome.failure is not None else 0

    def answer_lines(self, lines: Iterable[str]) -> int:
        self._thoughts.is_hidden = not notes().is_terminal
        num_answers = 0
        for line in map(str.strip, lines):
            if line.startswith("/"):
                if not self._obey(line):
                    return 0
                continue
            if not line:
                continue
            num_answers += 1
            outcome, was_interrupted = self._answer(line)
            if was_interrupted:
                return INTERRUPTED
            if outcome.failure is not None:
                return FAILURE
        if not num_answers:
            raise ConfigError("there is no prompt: neither --once nor anything on stdin")
        return 0

    def converse(self) -> int:
        console = notes()
        console.print(
            f"[dim]{escape(self._model.name)} at {escape(self._options.url)}. /help lists the commands.[/dim]"
        )
        console.print(f"[dim]Sampling: {escape(self._sampling.in_words(self._model))}. /set changes it.[/dim]")
        while True:
            try:
                line = input(PROMPT).strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            if line.startswith("/"):
                if not self._obey(line):
                    return 0
            elif line:
                outcome, was_interrupted = self._answer(line)
                if was_interrupted:
                    console.print("[dim](stopped)[/dim]")
                elif outcome.finish_reason == "length":
                    console.print("[dim](cut at the length limit; --max-tokens sets another)[/dim]")
                if self._has_forgotten:
                    console.print("[dim](the conversation outgrew the context: its oldest part is forgotten)[/dim]")

    def _obey(self, line: str) -> bool:
        command, _, argument = line.partition(" ")
        match command:
            case "/quit" | "/exit":
                return False
            case "/new":
                self._conversation.restart()
                notes().print("[dim]A new conversation.[/dim]")
            case "/system":
                self._conversation.system = argument.strip() or None
                self._conversation.restart()
                notes().print(
                    f"[dim]System message {'set' if argument.strip() else 'removed'}; a new conversation.[/dim]"
                )
            case "/model":
                self._choose_model(argument.strip())
            case "/set":
                self._set_sampling(argument.strip())
            case "/think":
                self._set_effort(argument.strip().lower())
            case "/image":
                self._add_picture(argument.strip())
            case "/help":
                notes().print(HELP, markup=False)
            case _:
                notes().print(f"There is no command {command}. /help lists them.", markup=False)
        return True

    def _choose_model(self, name: str) -> None:
        try:
            listed = asyncio.run(_served_models(self._options.url))
            self._model = find_model(listed, name) if name else self._model
        except (ConfigError, PeerError) as error:
            print_error(str(error))
            return
        if name:
            notes().print(f"[dim]Now talking to {escape(printable(self._model.name))}.[/dim]")
            return
        for model in listed:
            mark = "*" if model.name == self._model.name else " "
            notes().print(f"{mark} {printable(model.name)}", markup=False)

    def _set_sampling(self, argument: str) -> None:
        try:
            if argument:
                self._sampling.change(argument)
        except ConfigError as error:
            notes().print(f"{str(error).rstrip(chr(46))}.", markup=False)
            return
        notes().print(f"[dim]Sampling: {escape(self._sampling.in_words(self._model))}.[/dim]")

    def _add_picture(self, path: str) -> None:
        try:
            self._conversation.pictures.append(picture_part(path))
        except ConfigError as error:
            notes().print(f"{str(error).rstrip(chr(46))}.", markup=False)
            return
        count, endings = len(self._conversation.pictures), ("", "s")
        notes().print(f"[dim]Your next message shows {count} picture{endings[count > 1]}.[/dim]")

    def _set_effort(self, level: str) -> None:
        if level not in (*EFFORTS, _DEFAULT_EFFORT):
            notes().print(f"/think takes one of {', '.join(EFFORTS)}, {_DEFAULT_EFFORT}.", markup=False)
            return
        self._effort = None if level == _DEFAULT_EFFORT else level
        notes().print(f"[dim]Effort: {level}.[/dim]")

    def _answer(self, prompt: str) -> tuple[CompletionOutcome, bool]:
        self._conversation.ask(prompt)
        self._has_forgotten = False
        outcome, was_interrupted = CompletionOutcome(), False
        try:
            # A loop per answer: asyncio turns Ctrl-C into the cancellation of just this answer.
            asyncio.run(self._stream(outcome))
        except KeyboardInterrupt:
            was_interrupted = True
        self._thoughts.end()
        if outcome.text_parts and not outcome.text.endswith("\n"):
            print(flush=True)
        self._conversation.settle(outcome.text)
        if outcome.failure is not None:
            print_error(_explain(outcome.failure, self._options.url))
        return outcome, was_interrupted

    async def _stream(self, outcome: CompletionOutcome) -> None:
        max_tokens = self._max_tokens()
        async with OpenAiClient(url=self._options.url, api_key=client_api_key()) as client:
            while True:
                call = CompletionCall(CompletionApi.CHAT, self._body(max_tokens))
                await client.complete(call, outcome, self._print_piece, self._thoughts.show)
                if outcome.failure is None or outcome.failure.code != _CONTEXT_EXCEEDED:
                    return
                if self._conversation.forget_oldest():
                    self._has_forgotten = True
                elif max_tokens is not None and self._options.max_tokens is None:
                    max_tokens = None  # whatever the one long message leaves
                else:
                    return
                outcome.failure = None

    def _max_tokens(self) -> int | None:
        if self._options.max_tokens is not None or self._model.max_context_len is None:
            return self._options.max_tokens
        return max(1, min(MAX_ANSWER_LEN, self._model.max_context_len // 4))

    def _body(self, max_tokens: int | None) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self._model.name,
            "messages": self._conversation.messages(),
            **self._sampling.fields(self._model),
        }
        if self._effort is not None:
            body["reasoning_effort"] = self._effort
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        return body

    def _print_piece(self, text: str) -> None:
        self._thoughts.end()
        print(printable(text), end="", flush=True)


class _ThoughtPrinter:
    def __init__(self) -> None:
        self.is_hidden = False
        self._is_open = False

    def show(self, text: str) -> None:
        if not self.is_hidden:
            self._is_open = True
            notes().print(printable(text), style="dim", end="", markup=False, soft_wrap=True)

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            notes().print("\n")


def _explain(failure: ClientFailure, url: str) -> str:
    if failure.kind is ClientFailureKind.CONNECT:
        return f"nothing answers at {url}. Start a server there with: alignedserve serve"
    if is_key_wanted(failure.status, failure.code):
        return f"{failure.message} (set {CLIENT_KEY_VARIABLE} to a key that the server knows)"
    if failure.kind is ClientFailureKind.ERROR_EVENT:
        return f"the answer broke off: {failure.message}"
    return f"{failure.label}: {failure.message}"
