"""The command line door of the dispatcher: `python -m gt.server`."""
