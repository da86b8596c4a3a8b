"""The served system: starts, streams, transfers, the share of engine speed that it keeps."""
