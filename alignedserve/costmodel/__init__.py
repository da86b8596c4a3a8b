"""What work costs: seconds of an iteration and of a copy, by model and machine."""
