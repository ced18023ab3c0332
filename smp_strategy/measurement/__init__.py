"""Costs of units measured on the device, each kind of unit once, the work shared by all ranks."""
