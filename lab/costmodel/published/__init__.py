"""Cost models from published measurements; the files lie beside them, README.md says whose they are."""
