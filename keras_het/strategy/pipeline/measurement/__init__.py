"""What a plan rests on: times of layers and links, measured, and the same plan on all processes."""
