"""The simulator and its cost models: their speed, their distance from live systems."""
