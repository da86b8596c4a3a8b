"""`aligned_slo`: the policy, and each of its parts in a file."""
