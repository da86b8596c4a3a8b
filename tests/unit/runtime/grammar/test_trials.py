"""Grammars are tried in a process of their own, which ends with one that takes too long."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import orjson
import pytest

from alignedserve.core.errors import UnsupportedModel
from alignedserve.process.child_process import ChildProcess
from alignedserve.runtime.grammar.compiler import GrammarError, compile_now
from alignedserve.runtime.grammar.constraints import StructuredOutputs, part_of, serialize_alone
from alignedserve.runtime.grammar.trials import (
    ClientExhausted,
    GrammarTrial,
    GrammarTrials,
    TrialLane,
    TrialTurn,
    is_plain,
)
from alignedserve.runtime.grammar.vocabulary import TokenTable, token_table
from alignedserve.text.tokenizer import Tokenizer
from tests.support.grammars import PERSON, json_grammar, regex_grammar

pytestmark = pytest.mark.slow

POCKET = Path("alignedserve/pocket/model")


@pytest.fixture(scope="module")
def table() -> TokenTable:
    tokenizer = Tokenizer.load(POCKET)
    return token_table(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(0,))


@pytest.fixture
def trials(table: TokenTable) -> Iterator[GrammarTrials]:
    made = GrammarTrials(lambda: table, max_cpu_s=0.5)
    yield made
    made.close()


def test_good_ones_pass_and_bad_ones_are_refused_with_the_reason(trials: GrammarTrials) -> None:
    trials.start(PERSON).result()
    with pytest.raises(GrammarError, match="look-around"):
        trials.start(regex_grammar("(?=a)b")).result()
    assert trials.start(PERSON) is trials.start(PERSON)


def test_one_that_takes_too_long_is_refused_and_others_go_on(trials: GrammarTrials) -> None:
    endless = regex_grammar(".*" * 8000)
    with pytest.raises(GrammarError, match="too long"):
        trials.start(endless).result(timeout=25)
    trials.start(PERSON).result()
    with pytest.raises(GrammarError, match="too long"):
        trials.start(endless).result(timeout=0.1)  # it is remembered


def test_a_plain_schema_does_not_wait_for_slow_grammars(table: TokenTable) -> None:
    plain = json_grammar({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    trials = GrammarTrials(lambda: table, max_cpu_s=60.0)
    slow = [trials.start(regex_grammar(".*" * (8000 + more))) for more in range(3)]
    trials.start(plain).result(timeout=25)
    assert not any(one.done() for one in slow)
    trials.close()


DEEP: dict[str, Any] = {"type": "string", "maxLength": 32}
for _ in range(7):
    DEEP = {"type": "array", "items": DEEP, "minItems": 31, "maxItems": 32}
WIDE = {"anyOf": [{"type": "object", "properties": {f"a{n}": {"type": "string", "maxLength": 32}}} for n in range(25)]}


@pytest.mark.parametrize("schema", [DEEP, WIDE, {"enum": ["a" * n for n in range(100)]}])
def test_what_is_called_plain_compiles_in_no_time(table: TokenTable, schema: dict[str, Any]) -> None:
    grammar, vocabulary = serialize_alone(part_of(StructuredOutputs(json=schema))), table.vocabulary()
    assert is_plain(grammar)
    began_s = time.process_time()
    compile_now(vocabulary, grammar)
    assert time.process_time() - began_s < 0.5


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a*"},
        {"type": "string", "format": "date"},
        {"type": "string", "maxLength": 1000},
        {"type": "array", "items": {"$ref": "#"}},
        {"allOf": [{"type": "string"}, {"maxLength": 3}]},
        {"properties": {"a": {"items": {"pattern": "a"}}}},
        {"x-guidance": {"whitespace_pattern": "a*"}},
        {"enum": ["a" * 9000]},
    ],
)
def test_what_may_take_long_is_not_plain(schema: dict[str, Any]) -> None:
    assert not is_plain(orjson.dumps({"grammars": [{"json_schema": schema}]}).decode())
    assert not is_plain(regex_grammar("a"))


def test_a_process_that_is_lost_is_started_again(trials: GrammarTrials) -> None:
    trials.start(PERSON).result()
    process = trials._others.process._process
    assert process is not None
    process.kill()
    process.wait()
    trials.start(regex_grammar("yes|no")).result()


def test_a_process_that_cannot_be_started_says_nothing_of_a_grammar(table: TokenTable) -> None:
    tables: Iterator[OSError | TokenTable] = iter([OSError("no memory"), table])

    def load() -> TokenTable:
        loaded = next(tables)
        if isinstance(loaded, OSError):
            raise loaded
        return loaded

    trials = GrammarTrials(load)
    with pytest.raises(OSError, match="no memory"):
        trials.start(PERSON).result()
    trials.start(PERSON).result()
    trials.close()


def test_what_is_tried_does_not_hold_up_the_end(table: TokenTable) -> None:
    trials = GrammarTrials(lambda: table, max_cpu_s=60.0)
    trials.start(PERSON).result()
    running, waiting = trials.start(regex_grammar(".*" * 8000)), trials.start(regex_grammar("a|b"))
    while not running.running():
        time.sleep(0.001)
    began_s = time.monotonic()
    trials.close()
    assert time.monotonic() - began_s < 10.0
    assert waiting.cancelled()


def test_a_model_without_a_vocabulary_follows_none() -> None:
    tokenizer = Tokenizer.load(POCKET)
    trials = GrammarTrials(partial(token_table, tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=()))
    with pytest.raises(GrammarError, match="cannot follow a grammar"):
        trials.start(PERSON).result()
    trials.close()
    with pytest.raises(UnsupportedModel):
        token_table(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=())


@pytest.mark.parametrize(
    ("hostile", "other"),
    [(TrialTurn("hostile"), TrialTurn("other")), (TrialTurn("one", is_real_time=False), TrialTurn("one"))],
)
def test_tenants_take_turns_and_documents_those_after_chats(
    table: TokenTable, hostile: TrialTurn, other: TrialTurn
) -> None:
    """However many slow grammars one tenant sends, another's waits for one of them, even if the first sent it too."""
    have_come, ended = Event(), list[Future[None]]()

    def load() -> TokenTable:
        have_come.wait(20)
        return table

    trials = GrammarTrials(load, max_cpu_s=0.5)
    wanted = regex_grammar("[a-z]+ once")
    slow = [trials.start(regex_grammar(".*" * (8000 + more)), hostile) for more in range(6)]
    behind = trials.start(wanted, hostile)
    own = trials.start(wanted, other)
    assert behind is own
    for one in (*slow, own):
        one.add_done_callback(ended.append)
    have_come.set()
    own.result(timeout=60)
    trials.close()
    assert ended.index(own) <= 2
    assert all(one.done() for one in slow)


def test_a_document_is_tried_at_last_though_chats_never_cease() -> None:
    tried: list[str] = []
    may_go_on = Event()

    def attempt(grammar: str, _: ChildProcess) -> None:
        may_go_on.wait(20)
        tried.append(grammar)

    lane = TrialLane(attempt, lambda turns, seconds: None)
    for number in range(40):
        lane.add(GrammarTrial(f"chat {number}"), TrialTurn("chats"))
    document, last = GrammarTrial("document"), GrammarTrial("last")
    lane.add(document, TrialTurn("documents", is_real_time=False))
    lane.add(last, TrialTurn("chats"))
    may_go_on.set()
    for trial in (document, last):
        trial.result.result(timeout=20)
    lane.close()
    assert 10 < tried.index("document") < 25


def test_a_client_whose_grammars_take_long_waits_and_others_do_not(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.runtime.grammar.client_seconds.CLIENT_S", 0.01)
    trials.start(PERSON, TrialTurn("a")).result()
    with pytest.raises(ClientExhausted):
        trials.start(regex_grammar("yes|no"), TrialTurn("a"))
    trials.start(PERSON, TrialTurn("a")).result()  # it has been tried
    trials.start(regex_grammar("yes|no"), TrialTurn("b")).result()


def test_a_pattern_that_fails_at_the_first_token_is_refused(trials: GrammarTrials) -> None:
    rules = 'start: A\nA: B{1000}\nB: C{1000}\nC: "a"{1000}'
    with pytest.raises(GrammarError, match="too much memory, to compile"):
        trials.start(serialize_alone(part_of(StructuredOutputs(grammar=rules)))).result()
