"""From pods and windows to TrainingRun objects."""
