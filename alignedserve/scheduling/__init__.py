"""Which requests an iteration serves: one pure core for live workers and simulator, one policy per paper."""
