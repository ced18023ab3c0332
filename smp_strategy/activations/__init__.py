"""What units keep for backward, and what becomes of it: kept, computed again, or put into host memory."""
