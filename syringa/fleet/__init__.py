"""How many replicas of each model run, and where: the provider interface and the controller above it."""
