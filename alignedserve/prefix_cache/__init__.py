"""The prefix cache: names of full blocks by keyed hashes, and the cached blocks of one memory."""
