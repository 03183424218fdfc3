"""The loop and the front door in Python."""
