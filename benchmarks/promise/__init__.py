"""What is promised: chat beside documents, live and simulated, by policy, topology, tenant and load."""
