"""The explanation of a partition, as text and as a page."""
