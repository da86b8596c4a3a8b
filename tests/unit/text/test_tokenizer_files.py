"""The files of a tokenizer beside tokenizer.json: texts, chats and ends as transformers reads the same folder."""

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.runtime.model.served_model import resolve_model
from alignedserve.text.chat_template import ChatPrompt
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import end_token_id
from tests.support.marks import each
from tests.support.models.tiny_models import make_tiny_model, transformers_library

NOW = datetime(2026, 3, 4)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{{ image_token }}"
)
TEXTS = ("hello he", "a</s>he <s>b", " x <x> y", "<|im_end|>q <pad> <unk>", "hé  e\n e")
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def of_bytes(*, names_special: bool = True) -> Any:
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "<x>"]
    tokenizer = RustTokenizer(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"] if names_special else [])
    return tokenizer


def of_pieces(scheme: str | None) -> Any:
    """Return a tokenizer as Llama 2's; `scheme`: None has a normalizer put the space before a text."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz[]:.!?é\n", "▁h", "he", "▁he"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [("▁", "h"), ("h", "e"), ("▁h", "e")]
    tokenizer = RustTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return tokenizer


def write(folder: Path, tokenizer: Any, config: dict[str, Any], files: dict[str, Any] | None = None) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **config}
    beside = {
        "config.json": {"model_type": "llama", "vocab_size": 400},
        "tokenizer_config.json": whole,
        **(files or {}),
    }
    for name, content in beside.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def equals_transformers(folder: Path) -> None:
    theirs, ours = transformers_library().AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for tools in ([], TOOLS):
        expected = theirs.apply_chat_template(MESSAGES, tools=tools or None, tokenize=True, return_dict=False)
        prompt = ChatPrompt(MESSAGES, tools, add_generation_prompt=False)
        assert ours.encode_chat(prompt, now=NOW) == expected
    assert end_token_id(folder) == theirs.eos_token_id


NAMED_END = {"bos_token": "<s>", "eos_token": {"content": "</s>", **FLAGS}}
IM_END = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
TWO = {
    "chat_template.jinja": "J{{ messages|length }}",
    "additional_chat_templates/tool_use.jinja": "T{{ tools|length }}",
}
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens in the map alone": ({}, {"special_tokens_map.json": NAMED_END}),
    "the map goes before the config": ({"bos_token": "<pad>"}, {"special_tokens_map.json": ENDS}),
    "but not beside listed tokens": (
        {**ENDS, "added_tokens_decoder": {"0": {"content": "<pad>", **FLAGS}}},
        {"special_tokens_map.json": {"bos_token": "<pad>", "eos_token": "<unk>"}},
    ),
    "listed tokens that the vocabulary lacks": (
        {**IM_END, "added_tokens_decoder": {"700": {"content": "<|im_end|>", **FLAGS}}},
        {},
    ),
    "listed tokens with other flags": (
        {**ENDS, "added_tokens_decoder": {"1": {"content": "<s>", **FLAGS, "rstrip": True, "special": False}}},
        {},
    ),
    "added tokens in a file": (IM_END, {"added_tokens.json": {"<|im_end|>": 262, "<y>": 263, "<x>": 261}}),
    "a token without a row": ({**ENDS, "pad_token": "[PAD]"}, {}),
    "further tokens": ({**ENDS, "additional_special_tokens": ["<x>", "<|im_end|>"]}, {}),
    "further tokens by name": ({**ENDS, "extra_special_tokens": {"image_token": "<x>"}}, {}),
    "a name of the model's own": ({**ENDS, "image_token": "<x>"}, {}),
    "a space before, of no class": ({**ENDS, "add_prefix_space": True}, {}),
    "a space before": ({**ENDS, "add_prefix_space": True, "tokenizer_class": "GPT2Tokenizer"}, {}),
    "templates by name": ({**ENDS, "chat_template": {"default": "D", "tool_use": "T"}}, {}),
    "a list of templates": (
        {**ENDS, "chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]},
        {},
    ),
    "further templates": (ENDS, TWO),
    "a file goes before the list": (
        {**ENDS, "chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]},
        {"chat_template.jinja": "J"},
    ),
}


@pytest.mark.filterwarnings("default")
@each("name", FOLDERS)
def test_files_beside_tokenizer_json(name: str, tmp_path: Path) -> None:
    (folder := tmp_path / name.replace(" ", "-")).mkdir()
    write(folder, of_bytes(), *FOLDERS[name])
    equals_transformers(folder)


def test_an_end_that_is_an_ordinary_token(tmp_path: Path) -> None:
    write(tmp_path, of_bytes(names_special=False), ENDS)
    equals_transformers(tmp_path)


@pytest.mark.filterwarnings("default")
@each("scheme", [None, "always", "first"])
@each("class_name", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@each("fields", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}, {"add_bos_token": False}])
def test_spaces_before_texts_of_llama(
    scheme: str | None, class_name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, of_pieces(scheme), {**ENDS, "tokenizer_class": class_name, **fields})
    equals_transformers(tmp_path)


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    processors_template = {"chat_template.json": {"chat_template": "P"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "<s>"),
        ({"processor_config.json": {}}, "P"),
        ({"preprocessor_config.json": {}, **TWO}, "J0"),
    ]
    for number, (beside, expected) in enumerate(cases):
        (folder := tmp_path / str(number)).mkdir()
        write(folder, of_bytes(), ENDS, {**processors_template, **beside})
        assert Tokenizer.load(folder).render_chat(ChatPrompt([]), now=NOW) == expected


def test_what_is_not_used_is_named_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny_model(tmp_path, "llama", vocab_size=400)
    resolve_model(ModelSectionConfig(path=str(tmp_path)))
    assert not caplog.records
    files = {
        "config.json": (tmp_path / "config.json").read_text(),
        "special_tokens_map.json": {"eos_token": "<unk>"},
        "generation_config.json": {"suppress_tokens": [7], "num_beams": 1, "eos_token_id": -1},
        "model.safetensors.index.json": {},
        "adapter_config.json": {},
        "additional_chat_templates/rag.jinja": "R",
        "chat_template.json": {"chat_template": "P"},
        **TWO,
    }
    write(tmp_path, of_bytes(), {**ENDS, "added_tokens_decoder": {}, "split_special_tokens": True}, files)
    with caplog.at_level(logging.WARNING):
        resolve_model(ModelSectionConfig(path=str(tmp_path)))
    (line,) = caplog.messages
    assert line.partition(": ")[2] == (
        "model.safetensors.index.json, beside model.safetensors; adapter_config.json; adapters are served by "
        "lora.adapters; suppress_tokens of generation_config.json; additional_chat_templates/rag.jinja; chat_template "
        "of tokenizer_config.json; chat_template.json; eos_token of special_tokens_map.json; split_special_tokens of "
        "tokenizer_config.json."
    )
