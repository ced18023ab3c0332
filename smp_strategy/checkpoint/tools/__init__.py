"""The commands of ``smp`` on checkpoints: export, import, inspect, verify."""
