"""Putting the roles together: in one process, in local processes, or by joining a server.

The only importer of several roles.
"""
