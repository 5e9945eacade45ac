"""One vector of many variables, and the channel to functions that a process serves."""
