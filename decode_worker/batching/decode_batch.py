"""The running batch of a decode worker: whole in every iteration, or as a policy decides."""

from decode_worker.batching.running_batch import RunningBatch
from decode_worker.batching.scheduled_batch import ScheduledBatch

DecodeBatch = RunningBatch | ScheduledBatch
