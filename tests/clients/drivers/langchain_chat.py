"""LangChain's ChatOpenAI: a whole answer, a streamed one, several at once, token counts. Prints one JSON object."""

import json
import os

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(model=os.environ["MODEL"], temperature=0, max_tokens=24, stream_usage=True)
whole = chat.invoke("Spell cat.")
pieces = list(chat.stream("Spell cat."))
streamed = pieces[0]
for piece in pieces[1:]:
    streamed += piece
several = chat.batch(["Spell cat.", "Spell dog."])
told = {
    "whole": whole.content,
    "whole_usage": whole.usage_metadata,
    "num_pieces": len(pieces),
    "streamed": streamed.content,
    "streamed_usage": streamed.usage_metadata,
    "batch": [one.content for one in several],
    "with_stop": chat.bind(stop=["a"]).invoke("Spell cat.").content,
}
print(json.dumps(told))
