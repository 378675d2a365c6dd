"""Where one rank's time went: computing, communicating, copying, idle and why."""
