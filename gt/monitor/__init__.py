"""The instruction log and schedules: the work of dispatcher and workers, for people to read."""
