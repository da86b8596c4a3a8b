"""What measurements share: arguments, machines and records; servers, models and load; faults; devices and tables."""
