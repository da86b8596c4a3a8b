"""Decode workers, and in `colocated/` the (elastic) worker that does everything: prompts and decodes colocated."""
