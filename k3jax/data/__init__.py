"""Data of runs: sources, tokenised corpora, packed rows, mixtures, and reading ahead. Nothing here imports JAX."""
