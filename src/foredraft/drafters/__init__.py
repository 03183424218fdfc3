"""What proposes tokens."""
