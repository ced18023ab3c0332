"""What ranks hold: predicted from shapes before anything is spread, and counted where it is."""
