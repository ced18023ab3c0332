"""Saving and loading: every tensor under its plain name and in its whole shape."""
