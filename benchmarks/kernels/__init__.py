"""Kernels: attention and products of weights."""
