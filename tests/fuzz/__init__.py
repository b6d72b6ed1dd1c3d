"""Random differentiable programs, run by torch and by GT on random layouts and compared.

`python -m tests.fuzz --seconds 600` makes programs until the time is over, and prints its seed. A program that
differs is made smaller first, and is printed with the command that repeats it.

ops.py        the pool of ops: elementwise_ops.py, shape_ops.py and layer_ops.py
op_table.py   how an op is called, and how its arguments are drawn
programs.py   programs as data: leaves and steps, how they run, how they are drawn
compare.py    whether GT's values, dtypes, shapes and gradients are torch's
shrink.py     the smallest program that still differs
"""
