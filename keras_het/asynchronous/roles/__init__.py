"""Choice of asynchronous workers from measurements."""
