"""Parts that some deployments need, each a folder with an entry point; the core looks them up by name."""
