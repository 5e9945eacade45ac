"""What `keras-het report` says of a training: in the terminal, as a page, as a trace."""
