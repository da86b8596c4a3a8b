"""Harmony, the form of gpt-oss: an answer is messages, each in a channel.

`messages` makes a conversation one that its chat template can show, `parser` divides an answer's text, `grammar` holds
an answer to its tools, its constraint and the budget of its thoughts, `marks` are the control tokens of all three.
"""
