"""Chat, a stream, embeddings, and a refusal as its own exception."""

import litellm

litellm.suppress_debug_info = True

# --- shown
asked = {"model": "openai/pocket", "messages": [{"role": "user", "content": "Spell cat."}], "max_tokens": 24}
whole = litellm.completion(**asked, temperature=0)
print("chat:", whole.choices[0].message.content, whole.usage.total_tokens, "tokens")
chunks = litellm.completion(**asked, temperature=0, stream=True)
print("stream:", [chunk.choices[0].delta.content for chunk in chunks])
vectors = litellm.embedding(model="openai/pocket", input=["cat", "dog"]).data
print("embeddings:", [len(vector["embedding"]) for vector in vectors])
try:
    litellm.completion(**asked, temperature=9, num_retries=0)
except litellm.BadRequestError as error:
    print(type(error).__name__, error.status_code)
