"""Pipeline stages: a model divided by its layers among processes or hosts, on CPUs."""
