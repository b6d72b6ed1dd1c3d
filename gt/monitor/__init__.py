"""The window: what passes the dispatcher, for people to read."""
