"""A discrete-event simulator that runs the live system's own logics: commands become later events."""
