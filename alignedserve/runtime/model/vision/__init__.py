"""Config and weights of the encoders by which models see pictures."""
