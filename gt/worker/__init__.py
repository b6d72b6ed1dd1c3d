"""Workers: they hold tensors, run commands on them and send reports."""
