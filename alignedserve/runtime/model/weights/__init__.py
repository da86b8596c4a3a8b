"""The weights of a model in memory: read, assembled into products, shared by the processes of a host."""
