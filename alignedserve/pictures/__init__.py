"""Pictures: how models see them, and the process that decodes them."""
