"""Integration with Keras's `fit`: its sessions, and the common basis of the public callbacks."""
