"""Syringa side by side with its peers. Not installed: run from the repository's root."""
