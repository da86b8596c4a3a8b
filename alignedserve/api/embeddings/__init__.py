"""Embeddings of texts, and what is made of them: scores of pairs and rankings of documents."""
