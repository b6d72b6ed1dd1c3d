"""Tensors between workers: the interface of transports, and the transports."""
