"""Runs encoder models: whole prompts in one pass, then a vector or a score of each."""
