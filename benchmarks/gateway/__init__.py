"""The gateway: streams, bodies and keys."""
