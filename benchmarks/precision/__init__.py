"""Loss of accuracy, and gain of speed, by narrower weights and caches."""
