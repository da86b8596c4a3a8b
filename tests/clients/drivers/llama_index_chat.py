"""LlamaIndex: chat whole and streamed, a completion, embeddings. Prints one JSON object."""

import json
import os

from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

MODEL, BASE = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]
common = {"api_base": BASE, "api_key": "none"}
chat = OpenAILike(model=MODEL, is_chat_model=True, context_window=1024, temperature=0, max_tokens=24, **common)
messages = [ChatMessage(role="user", content="Spell cat.")]
vectors = OpenAILikeEmbedding(model_name=MODEL, **common).get_text_embedding_batch(["cat", "dog", "cat"])
told = {
    "whole": chat.chat(messages).message.content,
    "streamed": "".join(part.delta or "" for part in chat.stream_chat(messages)),
    "completed": isinstance(chat.complete("One, two,").text, str),
    "vectors": [len(vectors), vectors[0] == vectors[2], vectors[0] == vectors[1]],
}
print(json.dumps(told))
