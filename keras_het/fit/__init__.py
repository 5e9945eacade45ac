"""What knows Keras's `fit`: its sessions, and what the public callbacks share."""
