"""Which recorded rows are still of today's decisions: by the digest of the code, or by repeating a sample."""
