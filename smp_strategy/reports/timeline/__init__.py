"""Timelines: when each stage ran which pass, as text, a page, or a Chrome trace."""
