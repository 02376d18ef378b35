"""The processes of a server: supervisor, API servers and model workers. Imports no torch."""
