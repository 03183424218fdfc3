"""The arithmetic of speculation, in plain Python: when it pays, and how much to draft."""
