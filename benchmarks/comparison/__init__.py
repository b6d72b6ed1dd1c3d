"""GT beside its peers: the same workloads in one run. `python -m benchmarks.comparison --help`."""
