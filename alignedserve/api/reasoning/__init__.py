"""Reasoning models: the thought that comes before an answer, apart from it.

`formats` lists how families mark a thought, `parser` divides an answer's text, `grammar` lets a thought stand before
what an answer must match and bounds it, `effort` says what a model's template makes of `reasoning_effort`.
"""
