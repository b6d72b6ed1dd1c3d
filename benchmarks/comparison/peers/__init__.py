"""One program for each peer. Each runs in the environment of its peer, and prints one line of JSON."""
