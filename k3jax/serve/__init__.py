"""Running a model: generation from a prompt."""
