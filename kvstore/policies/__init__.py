"""Which chunk leaves a full tier of slots."""
