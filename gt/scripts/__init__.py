"""Commands that look at running programs: `python -m gt.scripts.trace`, and others."""
