"""Processes beside a worker's own that have some of a model's experts, whole."""
