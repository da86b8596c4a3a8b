"""Text and tokens: the tokenizer of a model folder and its chat template; no code of the folder runs."""
