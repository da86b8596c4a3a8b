"""The course of every request: kept for explanations, sent as traces."""
