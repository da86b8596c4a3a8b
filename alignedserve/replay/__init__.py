"""Recorded runs, decided again and simulated."""
