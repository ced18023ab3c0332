"""Conversion of checkpoints from and to other tools' forms."""
