"""Compiles spans of ops by Inductor, in the background."""
