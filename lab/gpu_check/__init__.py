"""One command that tells whether AlignedServe computes rightly on a GPU that nobody here has, and how fast."""
