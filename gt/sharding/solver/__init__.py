"""Auto-sharding: choose the layouts of a whole program."""
