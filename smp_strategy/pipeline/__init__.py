"""The pipeline: placed tensors, the schedule, and the runtime that follows it."""
