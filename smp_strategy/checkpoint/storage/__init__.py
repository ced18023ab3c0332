"""Files of checkpoints: sharded and full, with digests, written atomically."""
