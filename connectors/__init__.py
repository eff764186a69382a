"""Engines and APIs on top of the store."""
