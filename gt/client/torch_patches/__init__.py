"""Every private part of torch that the client uses or replaces, one file for each kind.

The rest of the client imports these names and no private name of torch (tests/test_architecture.py). Each file has a
test of the same name in tests/client/torch_patches, which fails when torch changes that part and says what breaks.
"""
