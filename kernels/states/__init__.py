"""Layers that keep what is before a token in a state of fixed size."""
