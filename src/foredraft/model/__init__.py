"""The target: loading, attention, keys and values, the one pass."""
