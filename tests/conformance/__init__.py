"""Does GT give torch's results? Every op of torch's own test database is run both ways and compared."""
