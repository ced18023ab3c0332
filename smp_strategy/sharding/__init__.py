"""Parameters, gradients and optimizer state that are spread over a group of ranks (MiCS)."""
