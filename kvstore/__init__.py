"""A KV-cache store for LLM serving: chunked, hash-addressed, tiered.

Importing this package starts nothing and imports neither torch nor an engine.
"""

__version__ = "0.1.0"
