"""Reports that people read: the partition, the timeline of a step, memory."""
