"""Tinker's API: the unmodified `tinker` package trains and samples on this cluster."""
