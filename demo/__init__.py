"""The main job, shown on the real thing: a vLLM that finds its KV again, in memory and after it was killed.

Run it with ``python -m demo`` (or ``make demo``).
"""
