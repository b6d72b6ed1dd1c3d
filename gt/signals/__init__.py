"""Signals: names that a program gives to its scopes, configured in YAML or Python with workers and layouts."""
