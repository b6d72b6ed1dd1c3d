"""Random differentiable programs, run by torch and by GT on random layouts and compared.

`python -m tests.fuzz --seconds 600` makes programs until the time is over, and prints its seed. A program that
differs is made smaller first, and is printed with the command that repeats it.

ops.py        the pool of ops, and how their arguments are drawn
programs.py   programs as data: leaves, steps, what runs them, how they are drawn
compare.py    whether GT's values, dtypes, shapes and gradients are torch's
shrink.py     the smallest program that still differs
"""
