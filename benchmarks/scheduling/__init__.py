"""Policies, the batches that they form and the lengths that they foresee."""
