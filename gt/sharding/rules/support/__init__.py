"""Helpers that the rules of several op families share."""
