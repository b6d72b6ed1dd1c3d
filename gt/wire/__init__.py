"""The corridor: typed messages to frames and back, and the channels they travel by."""
