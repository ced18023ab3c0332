"""What really happened in a step: when each stage did what, beside the timetable that was predicted."""
