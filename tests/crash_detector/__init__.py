"""A search for ops that end their process, or touch memory that is not theirs, whatever a client sends.

`python -m tests.crash_detector` calls every op that a worker may run with arguments that are wrong in many ways, on
tensors that end (or start) at a page that cannot be touched, in processes of their own.
"""
