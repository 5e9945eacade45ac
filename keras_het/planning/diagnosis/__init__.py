"""What a recording of steps says: which device is slow, why, and what that costs."""
