"""What the loader controller changes, and the settings that it finds."""
