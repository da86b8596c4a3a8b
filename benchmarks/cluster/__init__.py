"""A cluster's processes: starting, models that come and go, losses, hosts."""
