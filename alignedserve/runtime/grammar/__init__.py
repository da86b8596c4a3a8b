"""Grammars that answers are decoded under: what clients ask for, its compiled form, and masks of the next token."""
