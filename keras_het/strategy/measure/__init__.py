"""How long replicas compute, and devices that are emulated."""
