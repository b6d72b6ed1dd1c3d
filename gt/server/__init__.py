"""The command line of the dispatcher: `python -m gt.server`."""
