"""The control tokens and words of harmony.

An answer is messages, each `<|channel|>CHANNEL<|message|>TEXT`, with `<|end|><|start|>assistant` between two of them.
Thoughts are in the channel `analysis`, the answer in `final`, what is said to the user before a call in `commentary`. A
call is a message whose header names a recipient, `to=functions.NAME`; it ends the answer.
"""

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
ASSISTANT = "assistant"
FUNCTIONS = "functions."  # before a function's name

LEVELS = ("low", "medium", "high")  # of effort
