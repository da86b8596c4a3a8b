"""The laboratory measures and predicts: simulator, replay, planning, certification, load generator, traces."""
