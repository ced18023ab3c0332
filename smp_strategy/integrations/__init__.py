"""Frameworks: Lightning, Accelerate, Hydra, and the calls of SageMaker's library."""
