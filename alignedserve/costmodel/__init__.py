"""Cost of work: seconds of an iteration and of a copy, by model and machine."""
