"""Sharding: specs, rules, strategies and reshard plans, as pure functions. No torch, except in coverage.py."""
