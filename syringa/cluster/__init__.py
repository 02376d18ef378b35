"""The certificates by which the processes of a cluster authenticate each other."""
