"""Replays and simulates recorded runs."""
