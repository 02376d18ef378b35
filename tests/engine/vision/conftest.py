"""Read before any test here computes: as for the other models on `transformers`' definitions."""
