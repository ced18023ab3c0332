"""Options: names, types, defaults, text forms, and whether they go together. Nothing here imports torch."""
