"""Caches: what contexts take, and what happens where memory is short."""
