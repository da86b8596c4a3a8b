"""Write the pocket model's tokenizer: single bytes, whole numbers 0-999, and the words its tasks are made of.

    python scripts/pocket/make_tokenizer.py alignedserve/pocket/model

A pre-token is either one token or its single bytes. So any text survives a round trip, a number costs one token, and a
word outside the list comes letter by letter, which makes spelling and reversing it a matter of copying.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from alignedserve.pocket import phrases
from alignedserve.pocket.tasks import PocketTask, Skill, make_task
from alignedserve.pocket.words import PLACES, WORDS

PAD, BOS, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>",
)  # fmt: skip
PRE_TOKEN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]|\s"
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NUM_SAMPLED_TASKS = 3000  # per skill
MIN_OCCURRENCES = 6  # made-up words stay below it, words of the templates above

# Their answers are letters, which must stay letters.
_LETTER_SKILLS = (Skill.SPELLING, Skill.REVERSING)


def _sampled_texts() -> Iterator[str]:
    rng = random.Random(0)
    for skill in Skill:
        for _ in range(NUM_SAMPLED_TASKS):
            task: PocketTask = make_task(skill, rng)
            yield task.prompt
            if skill not in _LETTER_SKILLS:
                yield task.answer
    for text in phrases.SYSTEM:
        yield from [text] * MIN_OCCURRENCES


def _vocabulary() -> list[str]:
    split = _pre_tokenizer()
    pre_tokens = [pre for pre, _ in split.pre_tokenize_str(" ".join(WORDS + PLACES))]
    for word in [
        *WORDS,
        *PLACES,
        *(str(n) for n in range(1000)),
        *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    ]:
        pre_tokens += [word, "Ġ" + word]
    counts: Counter[str] = Counter()
    for text in _sampled_texts():
        counts.update(pre for pre, _ in split.pre_tokenize_str(text))
    frequent = [pre for pre, count in sorted(counts.items()) if count >= MIN_OCCURRENCES]
    return [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *pre_tokens, *frequent]


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(PRE_TOKEN), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def make_tokenizer() -> Tokenizer:
    """Build the tokenizer; the same words and phrases give the same token ids."""
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(_vocabulary()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json into the folder given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
