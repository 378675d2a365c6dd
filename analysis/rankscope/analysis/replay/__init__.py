"""Replays recorded steps with other durations: the graph of their work, the replay, what changes would bring."""
