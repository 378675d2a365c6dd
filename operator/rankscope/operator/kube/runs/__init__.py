"""From pods and daemons' windows to TrainingRun objects: whose ranks they are, and what is said of them."""
