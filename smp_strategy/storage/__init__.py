"""Checkpoints as files: what is written how, so that it is complete or not there, and verified when it is read."""
