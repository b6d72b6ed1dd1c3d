"""The client: a torch tensor without bytes, and the session that sends its ops to a dispatcher as instructions."""
