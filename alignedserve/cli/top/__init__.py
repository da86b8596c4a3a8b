"""`alignedserve top`: what a running cluster does, in the terminal."""
