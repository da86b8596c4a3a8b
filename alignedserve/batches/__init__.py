"""Batches of best-effort lines: files, durable state, one terminal record per line, whatever dies."""
