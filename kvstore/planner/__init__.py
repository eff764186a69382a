"""Decides: what is where, what to load, save and evict. Pure: no I/O, no threads, no clock, no torch."""
