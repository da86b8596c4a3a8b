"""Settings of a cluster of several models: those of all, and each model's own."""

import math
from pathlib import Path

import pytest

from alignedserve.config.loading import apply_override, load_config
from alignedserve.config.model_settings import load_models, name_of
from alignedserve.config.overrides import written_override
from alignedserve.core.errors import ConfigError
from tests.support.marks import each


def test_one_model_is_configured_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {path: /from/file, dtype: float32}\ndecode: {count: 2}\n")
    overrides = ["gateway.port=1234", "model.quantization=int8"]
    assert load_models(file, overrides, ()).configs == (load_config(file, overrides),)
    named = load_config(file, ["model.path=/other", *overrides])
    assert load_models(file, overrides, ("/other",)).configs == (named,)
    assert load_models(None, ["model.path=/set"], ("/argument",)).configs[0].model.path == "/set"


def test_a_setting_holds_for_all_models_or_for_the_one_that_it_names() -> None:
    settings = load_models(
        None,
        ["model.dtype=float32", "B.Q4.decode.count=2", "chat.engine.threads_per_worker=1"],
        ("chat=/a", "/b/B.Q4.gguf"),
    )
    chat, other = settings.configs
    assert (chat.model.served_model_name, chat.model.path, other.model.path) == ("chat", "/a", "/b/B.Q4.gguf")
    assert chat.model.dtype == other.model.dtype == "float32"
    assert (chat.decode.count, other.decode.count) == (1, 2)
    assert (chat.engine.threads_per_worker, other.engine.threads_per_worker) == (1, None)


def test_adapters_are_of_the_model_that_they_are_set_for() -> None:
    overrides = ["lora.max_rank=8", "a.lora.adapters={one: /one}", "b.lora.adapters.two=/two"]
    a, b, c = load_models(None, overrides, ("a=/a", "b=/b", "c=/c")).configs
    assert [config.lora.adapters for config in (a, b, c)] == [{"one": "/one"}, {"two": "/two"}, {}]
    assert [config.lora.max_rank for config in (a, b, c)] == [8, 8, 8]
    assert [config.lora.worker_bytes > 0 for config in (a, b, c)] == [True, True, False]


def test_a_model_that_is_added_has_no_adapters_and_a_replacement_those_of_before() -> None:
    settings = load_models(None, ["lora.adapters={one: /one}"], ("a=/a",))
    added = settings.another("/b", "b")
    assert [config.lora.adapters for config in settings.with_models([*settings.own, added]).configs] == [
        {"one": "/one"},
        {},
    ]
    for given, adapters in (((), {"one": "/one"}), (["lora.adapters={two: /two}"], {"two": "/two"})):
        (config,) = settings.with_models([settings.another("/new", "a", given, like=settings.own[0])]).configs
        assert config.lora.adapters == adapters


def test_the_file_lists_models_with_sections_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "decode: {count: 2}\nmodels:\n- model: {path: /a}\n- model: {path: /b}\n  decode: {kv_cache_bytes: 1GiB}\n"
    )
    a, b = load_models(file, (), ()).configs
    assert (a.model.path, a.decode.count) == ("/a", 2)
    assert (b.model.path, b.decode.count, b.decode.kv_cache_bytes) == ("/b", 2, 2**30)


@each(
    ("overrides", "models", "says"),
    [
        (["a.gateway.port=1"], ("/x/a", "/x/b"), "gateway is of the whole cluster"),
        (["model.path=/c"], ("/x/a", "/x/b"), "model.path is one model's"),
        ([], ("/x/a", "/y/a"), "two models are called a"),
        (["c.decode.count=2"], ("/x/a", "/x/b"), "^unknown field `c`"),
        (["b.decode.cuont=2"], ("/x/a", "/x/b"), "^the model 2, b: decode: unknown field `cuont`; did you mean"),
        (["decode.cuont=2"], ("/x/a", "/x/b"), "^decode: unknown field `cuont`; did you mean"),  # of all models
        (["lora.adapters={one: /one}"], ("/x/a", "/x/b"), "set NAME.lora.adapters"),
        (["a.lora.adapters={b: /one}"], ("/x/a", "/x/b"), "the adapter b of a is called as another"),
        (["a.lora.adapters={c: /one}", "b.lora.adapters.c=/c"], ("/x/a", "/x/b"), "the adapter c of b is called as"),
        ([], ("=/x", "/y"), "write MODEL or NAME=MODEL"),
    ],
)
def test_mistakes_are_named(overrides: list[str], models: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_models(None, overrides, models).configs  # noqa: B018


@pytest.mark.parametrize("text", ["models: 3", "models: []", "models: [{decode: {}}]", "models: [{links: {}}]"])
def test_a_list_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^models:"):
        load_models(tmp_path / "config.yaml", (), ())


def test_models_of_the_file_and_of_the_command_line_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("models: [{model: {path: /a}}]")
    with pytest.raises(ConfigError, match="leave one of them out"):
        load_models(tmp_path / "config.yaml", (), ("/b",))


def test_one_more_model_inherits_what_is_of_all() -> None:
    settings = load_models(None, ["model.dtype=float32", "model.max_context_len=64", "decode.count=2"], ("/a",))
    own = settings.another("/b", "b", ["decode.max_running_requests=3"])
    _, config = settings.with_models([*settings.own, own]).configs
    assert (config.model.path, config.model.served_model_name, config.model.dtype) == ("/b", "b", "float32")
    assert (config.model.max_context_len, config.decode.count, config.decode.max_running_requests) == (None, 2, 3)


def test_a_replacement_has_workers_like_those_it_replaces() -> None:
    settings = load_models(None, ["a.decode.count=3", "a.model.max_context_len=99"], ("a=/a", "b=/b"))
    own = settings.another("/new", "a", like=settings.own[0])
    assert name_of(own) == "a"
    (config,) = settings.with_models([own]).configs
    assert (config.model.path, config.decode.count, config.model.max_context_len) == ("/new", 3, None)
    with pytest.raises(ConfigError, match="gateway is of the whole cluster"):
        settings.another("/new", "a", ["gateway.port=1"])


@each(
    "value",
    [
        1e-05,
        1e16,
        math.inf,
        None,
        True,
        "yes",
        "1e3",
        "2026-11-25",
        "",
        " a: b # c",
        "a\nb",
        "🦊 ü",
        {"🦊": [1, [2.5]]},
    ],
)
def test_a_written_override_is_read_as_the_value_that_it_was(value: object) -> None:
    values: dict[str, object] = {}
    apply_override(values, written_override("model.sampling", value))
    assert values == {"model": {"sampling": value}}
