"""Measured ratios, each against its baseline in the same run."""
