"""Records that all packages share: metas, messages, errors, settings. No torch, no sockets, no clock."""
