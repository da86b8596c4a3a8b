"""One small router per group of endpoints."""
