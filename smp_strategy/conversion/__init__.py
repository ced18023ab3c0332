"""Checkpoints of one form, or of other tools, as another form: read tensor by tensor, written the same way."""
