"""Data loaders, as both Lightning and Accelerate use them."""
