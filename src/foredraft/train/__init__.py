"""Training of heads: answers by the target itself, its features, and what a head learns from them.

The modules are those of ``foredraft.heads``, the very ones that draft.
"""
