"""The certificates of a cluster: who may talk to the workers of other machines."""
