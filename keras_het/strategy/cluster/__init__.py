"""The processes of a training: their identity, their agreements and their end."""
