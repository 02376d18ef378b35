"""Execution of steps: synchronous on a CPU, overlapped with the host's work on a GPU."""
