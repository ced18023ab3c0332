"""The command ``smp``: checkpoints written as other programs want them, taken over from those, looked at, verified."""
