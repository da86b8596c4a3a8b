"""Scheduling of iterations: one pure core for live workers and simulator, one policy per paper."""
