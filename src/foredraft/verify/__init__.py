"""Which draft tokens are accepted, by the default rule and by the classical ones."""
