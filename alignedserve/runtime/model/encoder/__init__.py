"""Config, sentence-transformers files and weights of encoder models."""
