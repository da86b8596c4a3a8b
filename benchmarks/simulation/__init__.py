"""The simulator: its speed, and its distance from live runs."""
