"""The settings that the loader controller changes, and the ones that it finds."""
