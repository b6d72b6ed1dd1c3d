"""The dashboard: a web page that shows what a program, or a server, does now."""
