"""The soak: a real server under mixed load, hostile input and faults. See docs/development/soak.md."""
