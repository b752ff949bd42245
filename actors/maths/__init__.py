"""Pure functions on tensors and arrays: losses, batching, metrics."""
