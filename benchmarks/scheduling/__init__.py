"""Decisions: what they cost, and how good they are."""
