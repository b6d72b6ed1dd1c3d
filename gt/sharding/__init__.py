"""The decisions: pure functions over shapes and specs. No torch, sockets, clocks or threads."""
