"""The workshop: commands in, tensors held, reports out."""
