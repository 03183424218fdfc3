"""Heads tied to a target: one copy of each module for drafting, training and export."""
