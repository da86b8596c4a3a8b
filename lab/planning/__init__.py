"""The planner: which workers, topology and policy hold the objectives of a workload at the least cost."""
