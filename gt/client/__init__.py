"""The front room: a torch tensor that records what is done with it, and the session that sends the record on."""
