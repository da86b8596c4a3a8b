"""Nodes added and removed by load, through Ray's autoscaler."""

from plugins.autoscaler.scaler import scaling_of

__all__ = ["scaling_of"]
