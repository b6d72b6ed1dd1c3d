"""Messages between client, dispatcher and workers: their encoding, connections, authentication and shared memory."""
