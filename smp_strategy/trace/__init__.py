"""What a step does: its events in program order, and what each call returns and costs."""
