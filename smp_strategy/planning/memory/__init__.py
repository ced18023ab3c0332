"""Memory estimates: what a rank holds of parameters, gradients and optimizer state."""
