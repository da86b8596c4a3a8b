"""Offline inference: `llm` generates from Python in this process, without a cluster."""
