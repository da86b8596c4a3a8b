"""An agent's loop: the model calls a function, the SDK runs it, the model answers."""

from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


# --- shown
@function_tool
def spell(word: Literal["cat", "dog"]) -> str:
    return " ".join(word)


settings = ModelSettings(temperature=0, max_tokens=200, tool_choice="required")  # of the first turn alone
agent = Agent(name="Speller", model="pocket", tools=[spell], model_settings=settings)
done = Runner.run_sync(agent, "Spell cat.")
for item in done.new_items:
    raw = item.to_input_item()
    print(item.type, raw.get("arguments") or raw.get("output") or raw["content"][0]["text"])
print(done.context_wrapper.usage.requests, "requests")
