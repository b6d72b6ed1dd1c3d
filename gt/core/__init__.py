"""The nouns of GT: metas, messages, errors, settings. No torch, no sockets, no clock."""
