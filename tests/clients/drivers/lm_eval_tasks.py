"""lm-eval with tasks of its own: generated answers by chat, likeliest continuations by completions. Prints JSON."""

import json
import os
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

base_url, tokenizer = os.environ["OPENAI_BASE_URL"], sys.argv[1]
tasks = TaskManager(include_path=str(Path(__file__).parent), include_defaults=False)
common = {"model": os.environ["MODEL"], "num_concurrent": 4}
os.chdir(Path(__file__).parent)
spelled = lm_eval.simple_evaluate(
    model="local-chat-completions",
    model_args=common | {"base_url": f"{base_url}/chat/completions"},
    tasks=["spelling"],
    task_manager=tasks,
    apply_chat_template=True,
)
chosen = lm_eval.simple_evaluate(
    model="local-completions",
    model_args=common | {"base_url": f"{base_url}/completions", "tokenizer": tokenizer},
    tasks=["choosing"],
    task_manager=tasks,
)
told = {
    "spelling": spelled["results"]["spelling"]["exact_match,none"],
    "choosing": chosen["results"]["choosing"]["acc,none"],
}
print(json.dumps(told))
