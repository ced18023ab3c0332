"""Plans a step: what it costs, which partition and which schedule are best."""
