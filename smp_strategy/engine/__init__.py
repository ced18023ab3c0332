"""The engine: the one place that knows every part."""
