"""Which units recompute or offload activations, so that stages fit their memory limits."""
