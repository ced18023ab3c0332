"""Tensor parallelism: single layers are split over ranks, and compute what they computed as a whole."""
