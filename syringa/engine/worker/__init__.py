"""The model worker: the engine core, and the process that serves it to API processes."""
