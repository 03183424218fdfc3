"""From logits to tokens: processed logits, position-keyed noise, the target's pick."""
