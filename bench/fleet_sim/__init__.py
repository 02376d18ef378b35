"""A simulation of a fleet of 1,000 nodes, with the real controller and the real router."""
