"""Hooks of the user see the whole model, whichever rank holds it."""
