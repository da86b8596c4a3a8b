"""The engine of one worker, without a cluster."""
