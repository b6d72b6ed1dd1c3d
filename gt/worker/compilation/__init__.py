"""Compiles runs of ops by Inductor, in the background."""
