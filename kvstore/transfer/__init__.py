"""Moves bytes: lanes (threads), copies, the executor, the prober."""
