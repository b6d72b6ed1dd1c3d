"""Configuration: where and how named scopes run, in YAML or Python."""
