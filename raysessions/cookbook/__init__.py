"""Shared parts of recipes: environments, rollouts, tables. They use the public clients only."""
