"""Starts client, dispatcher and workers: in one process, with local worker processes, or by joining a server.

The only package that imports several roles.
"""
