"""Which workers train asynchronously, chosen from what was measured."""
