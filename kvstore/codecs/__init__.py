"""How a payload's bytes are stored in a record."""
