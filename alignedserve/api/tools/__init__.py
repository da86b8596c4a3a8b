"""Tool calls in a model's answer.

`formats` lists how families of models write calls, `call_parser` finds them in an answer's text as it comes (its
`object_reader` and `parameter_reader` read the two kinds of calls), `call_grammar` holds an answer to its tools,
`prompts` tells tools to models whose chat template cannot.
"""
