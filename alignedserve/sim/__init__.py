"""A discrete-event simulator that drives the live system's own logics: commands become later events."""
