"""The soak: a real server under mixed load, hostile input and faults. `python -m bench.soak` (see README.md there)."""
