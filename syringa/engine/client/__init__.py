"""The clients of model workers, and the protocol between the two."""
