"""gt.compile: calls that are recorded and repeated without their Python code."""
