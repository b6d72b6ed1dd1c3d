"""GT: PyTorch programs on one process, several workers, or a cluster, unchanged."""
