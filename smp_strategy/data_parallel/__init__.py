"""Data parallelism: gradient all-reduce, ZeRO-1, and sharding over groups of ranks (ZeRO-3, MiCS)."""
