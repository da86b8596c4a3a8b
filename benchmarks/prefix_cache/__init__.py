"""The prefix cache: turns of conversations, batches with one instruction, takeovers, hit rates, and what it costs."""
