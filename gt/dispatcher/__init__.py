"""The dispatcher: knows the layout of every tensor, plans every op, and puts all commands in one order."""
