"""The served models: what each one's requests need, and which one a request names."""
