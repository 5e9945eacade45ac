"""The processes of a training: who they are, what they agree on, and how they end."""
