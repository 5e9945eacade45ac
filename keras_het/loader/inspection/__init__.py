"""Inspection of running pipelines: their stages, and where the time goes."""
