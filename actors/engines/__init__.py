"""Engines hold models: gradients, adapters, generation. They know nothing of Ray."""
