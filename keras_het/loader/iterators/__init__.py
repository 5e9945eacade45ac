"""Pipelines that can be built again and handed over, and iterators that end without a stall."""
