"""The user's module: units, annotations, ownership of parameters, initial values."""
