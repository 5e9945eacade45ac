"""Pipelines that can be rebuilt and handed over, and iterators that end without a stall."""
