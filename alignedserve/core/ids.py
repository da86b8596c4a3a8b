"""Identifiers. Distinct types for the type checker, plain strings and ints at run time."""

from typing import NewType

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)
BatchId = NewType("BatchId", int)
LeaseId = NewType("LeaseId", int)
WorkerName = NewType("WorkerName", str)
