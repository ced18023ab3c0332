"""Hugging Face architectures, tiny and with random weights, for comparison with one process."""
