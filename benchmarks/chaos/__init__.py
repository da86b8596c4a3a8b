"""Chaos, kept: seeded schedules of faults against the processes of a cluster, one judge, and what is promised."""
